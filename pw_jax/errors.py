"""The one exception for mistakes that the user can mend."""


class UserError(Exception):
    """Bad input: a file, tensor, flag or size that the caller can correct.

    The message is one line that names what is wrong and says what to do. Scripts print it after
    ``error:`` and exit with code 2; anything else that escapes is a bug in this project.
    """
