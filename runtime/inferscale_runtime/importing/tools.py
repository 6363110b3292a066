"""Which tool, where, and how: ``mem0:https://...`` and options become a reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from inferscale_runtime.errors import ConfigError
from inferscale_runtime.importing import letta, mem0_http, zep
from inferscale_runtime.importing.answers import Reader
from inferscale_runtime.importing.client import ToolClient, read_token

TOOLS = ("mem0", "zep", "letta")
_DEFAULT_URLS = {"zep": zep.DEFAULT_URL, "letta": letta.DEFAULT_URL}
_OPTIONS = {
    "mem0": ("api", "turns"),
    "zep": ("turns",),
    "letta": ("users-from", "blocks"),
}
_YES_OR_NO = {"true": True, "false": False}


def split_source(text: str) -> tuple[str, str]:
    """Splits ``TOOL[:PLACE]``.

    Returns:
        The tool and its place; a tool's own default where none is given.

    Raises:
        ConfigError: There is no such tool, or it has no default.
    """
    tool, _, place = text.partition(":")
    if tool not in TOOLS:
        raise ConfigError(f"source '{tool}': no such tool; there is {', '.join(TOOLS)}")
    place = place or _DEFAULT_URLS.get(tool, "")
    if not place:
        raise ConfigError(
            f"source {tool}: say where it is: the URL of its server, {mem0_http.PLATFORM_URL}, or "
            "the file with the library's configuration"
        )
    return tool, place


def parse_options(tool: str, pairs: Iterable[str]) -> dict[str, str]:
    """Reads ``KEY=VALUE`` options.

    Raises:
        ConfigError: The tool has no such option, or it is given twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or key not in _OPTIONS[tool] or key in found:
            known = ", ".join(_OPTIONS[tool])
            what = "is given twice" if key in found else f"is unknown; {tool} has {known}"
            raise ConfigError(f"source {tool}: option '{key}' {what} (write KEY=VALUE)")
        found[key] = value
    return found


def open_reader(
    tool: str, place: str, options: Mapping[str, str], token_file: str | None, flag: str
) -> Reader:
    """Makes the reader of a tool.

    Args:
        tool: One of `TOOLS`.
        place: URL, or for mem0 also the file with the library's configuration.
        options: As `parse_options` returns them.
        token_file: File with the API key; the tool's own environment variable without one.
        flag: Name of the flag that names the file, for messages.

    Raises:
        ConfigError: An option or the token cannot be used.
    """
    token = read_token(token_file, flag, f"{tool.upper()}_API_KEY")
    turns = _flag(tool, options, "turns")
    if tool == "mem0":
        if "://" not in place:
            from inferscale_runtime.importing.mem0_library import Mem0Library

            if options:
                raise ConfigError(f"source mem0 '{place}': the library has no options")
            return Mem0Library(place)
        if _is_platform(place, options):
            client = ToolClient(tool, place, header="Authorization", scheme="Token ", token=token)
            return mem0_http.Mem0Platform(client, turns=turns)
        if turns:
            raise ConfigError(
                "source mem0: option 'turns' is for the platform; its server keeps no messages"
            )
        client = ToolClient(tool, place, header="X-API-Key", scheme="", token=token)
        return mem0_http.Mem0Server(client)
    if tool == "zep":
        client = ToolClient(tool, place, header="Authorization", scheme="Api-Key ", token=token)
        return zep.ZepReader(client, turns=turns)
    client = ToolClient(tool, place, header="Authorization", scheme="Bearer ", token=token)
    blocks = tuple(filter(None, options.get("blocks", "human").split(",")))
    return letta.LettaReader(
        client, users_from=options.get("users-from", letta.IDENTITY), blocks=blocks
    )


def _is_platform(place: str, options: Mapping[str, str]) -> bool:
    api = options.get("api") or (
        "platform"
        if urlsplit(place).hostname == urlsplit(mem0_http.PLATFORM_URL).hostname
        else "server"
    )
    if api not in ("platform", "server"):
        raise ConfigError(f"source mem0: option 'api' is '{api}'; write platform or server")
    return api == "platform"


def _flag(tool: str, options: Mapping[str, str], name: str) -> bool:
    value = options.get(name, "false")
    if value not in _YES_OR_NO:
        raise ConfigError(f"source {tool}: option '{name}' is '{value}'; write true or false")
    return _YES_OR_NO[value]
