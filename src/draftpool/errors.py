"""The one exception that users see."""


class DraftpoolError(Exception):
    """A mistake of the user or the machine, told in one line: what, where, remedy.

    Args:
        what: What is wrong, for example ``unknown key 'taps_layers'``.
        where: The key, file or row concerned.
        remedy: What to do about it.
    """

    def __init__(self, what: str, where: str = "", remedy: str = ""):
        parts = [f"{where}: {what}" if where else what]
        if remedy:
            parts.append(remedy)
        super().__init__(" ".join(" -> ".join(parts).split()))


class PeerLostError(Exception):
    """Another process of a shared training has gone; why, that process or its launcher says."""
