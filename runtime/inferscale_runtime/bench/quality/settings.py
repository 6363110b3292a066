"""What is compared: a context policy, how many facts are linked, and the facts' order (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from inferscale_runtime.encode.policies import parse_policy
from inferscale_runtime.errors import ConfigError
from inferscale_runtime.prompt.plan import Order

DEFAULT_SETTINGS = (
    "none,turns:5,turns:20,turns:50,facts:5,facts:20,neighbours:5,neighbours:10,neighbours:20,"
    "chain:10,neighbours:10+link1,neighbours:10+link3,neighbours:10+link5,neighbours:10+stored"
)

_OPTION = re.compile(r"link(?P<link>[1-9]\d{0,2})|stored")


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to encode and to serve.

    Attributes:
        policy: Context policy of the encoding.
        link_tail: Best facts that are prefilled over the injected rest.
        order: Order of the facts in the prompt.
    """

    policy: str
    link_tail: int = 0
    order: Order = "relevance"

    @property
    def name(self) -> str:
        """As ``parse_setting`` reads it."""
        link = f"+link{self.link_tail}" if self.link_tail else ""
        return self.policy + link + ("+stored" if self.order == "stored" else "")


def parse_setting(text: str) -> Setting:
    """Reads ``POLICY[+linkN][+stored]``, such as ``neighbours:10+link5``.

    Raises:
        ConfigError: Naming the value.
    """
    policy, *options = text.split("+")
    parse_policy(policy)
    link, order = 0, "relevance"
    for option in options:
        match = _OPTION.fullmatch(option)
        if match is None:
            raise ConfigError(
                f"--settings '{text}': '+{option}' is unknown; write POLICY, POLICY+linkN (N best "
                "facts prefilled) or POLICY+stored (facts in the order of learning)"
            )
        if option == "stored":
            order = "stored"
        else:
            link = int(match["link"])
    return Setting(policy, link, "stored" if order == "stored" else "relevance")


def parse_settings(text: str) -> list[Setting]:
    """Reads settings with commas; each once, in their order.

    Raises:
        ConfigError: Naming the value.
    """
    return list(dict.fromkeys(parse_setting(part.strip()) for part in text.split(",")))
