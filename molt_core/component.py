"""What every plugin component has in common: a docstring, a nested ``Config``, and its instance."""

from typing import Any, ClassVar

from pydantic import BaseModel


class Component:
    """Base of everything that a plugin registers (environment, estimator, reward, loss, tracker).

    Declare options in a nested pydantic ``Config``; the validated instance is ``self.config``.
    """

    class Config(BaseModel):
        """No options."""

    kind: ClassVar[str] = ""

    def __init__(self, config: BaseModel | None = None) -> None:
        self.config: Any = self.Config() if config is None else config
