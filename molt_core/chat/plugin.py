"""The built-in chat-template adapter. Light: nothing heavy is imported at discovery."""

from collections.abc import Callable

from molt_core import hookimpl


@hookimpl
def molt_register_chat_templates(register: Callable[[str, object], None]) -> None:
    """Register the adapter that works from the tokenizer's own template."""
    register("default", "molt_core.chat.template:ChatTemplate")
