"""Forty names as they come from job scripts, and from people who mean harm."""

from __future__ import annotations

from typing import Final

#: What a script that runs sets: no page may ever have it.
CANARY: Final = "smonCanary"

_RUN: Final = f"window.{CANARY}=1"

HOSTILE: Final = (
    f"<script>{_RUN}</script>",
    f'"><img src=x onerror="{_RUN}">',
    f"'><svg onload={_RUN}>",
    f"</script><script>{_RUN}</script>",
    f"</title><script>{_RUN}</script>",
    f"</textarea><iframe srcdoc='<script>parent.{_RUN}</script>'>",
    f"<!-- --><style>@import 'x'</style><b onclick={_RUN}>b</b>",
    "<!-- --> ]]> <![CDATA[",
    f"javascript:{_RUN}",
    f"data:text/html,<script>{_RUN}</script>",
    f"' onmouseover='{_RUN}",
    f'" autofocus onfocus="{_RUN}',
    f"`${{{_RUN}}}`",
    f"'; {_RUN}; //",
    f"\\u003cscript\\u003e{_RUN}\\u003c/script\\u003e",
    "{{7*7}}",
    "{% include 'job.html' %}",
    "${7*7}#{7*7}<%= 7*7 %>",
    "&lt;b&gt;&amp;&#x41;&copy;",
    "%3Cscript%3E%00",
    "../../etc/passwd",
    "..\\..\\windows",
    "/jobs/../hosts?x=1#y",
    "?q=1&name=2#fragment",
    "a/b/c//d",
    ".",
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1:A9)",
    '"quoted", and; split\'',
    "'; DROP TABLE jobs; --",
    "$(reboot) `reboot` && reboot",
    "name with   three spaces",
    "日本語のジョブ名",
    "عربي و English",
    "🔥 émoji ñ ß",
    "👩‍🚀 joined by U+200D",
    "\u202egnp.exe turned around",
    "x" * 200,
)

#: What no way in takes: control characters.
REFUSED: Final = ("two\nlines", "bell\x07", "nul\x00", "\x1b[31mred", "")
