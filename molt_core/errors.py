"""The one exception that means "the user can fix this by changing what they wrote"."""


class ConfigError(ValueError):
    """A setting, file or plugin is wrong; the message is one sentence that says what to change.

    Raised before anything expensive starts. The command line prints it and exits with code 2.
    """
