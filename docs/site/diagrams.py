"""Draws the diagrams of ``docs/architecture.md`` as SVG files: ``python docs/site/diagrams.py``.

A diagram is a list of shapes, each a string of SVG. Coordinates are pixels from the upper left corner.
"""

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "diagrams"
COLORS = {"draft": "#dbeafe", "full": "#dcfce7", "lossy": "#fef3c7", "plain": "#f3f4f6", "none": "none"}
INK, QUIET = "#1f2937", "#6b7280"


def text(x: float, y: float, words: str, anchor: str = "middle", color: str = INK, size: int = 13) -> str:
    """Lines of text, separated by ``\\n``, centred vertically at ``y``."""
    lines = words.split("\n")
    first = y - (len(lines) - 1) * 8 + 4
    spans = "".join(f'<tspan x="{x}" y="{first + 16 * i}">{escape(line)}</tspan>' for i, line in enumerate(lines))
    return f'<text text-anchor="{anchor}" fill="{color}" font-size="{size}">{spans}</text>'


def box(x: float, y: float, width: float, height: float, words: str, kind: str = "plain") -> str:
    """A rectangle with text in its middle."""
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{COLORS[kind]}" stroke="{INK}"/>'
    return shape + text(x + width / 2, y + height / 2, words)


def arrow(*points: tuple[float, float], label: str = "", at: tuple[float, float] | None = None, anchor: str = "middle", dashed: bool = False) -> str:
    """A line with an arrowhead at its end. ``label`` is written at ``at``, or above the middle of the first part."""
    path = " ".join(f"{x},{y}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    line = f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.4" marker-end="url(#head)"{dashes}/>'
    (x0, y0), (x1, y1) = points[:2]
    x, y = at or ((x0 + x1) / 2, (y0 + y1) / 2 - 10)
    return line + (text(x, y, label, anchor, QUIET, 12) if label else "")


def svg(width: int, height: int, title: str, *shapes: str) -> str:
    """A whole SVG file with a white background, which is readable in a dark theme, too."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="DejaVu Sans, Verdana, sans-serif">'
    tip = f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/>'
    marker = f'<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">{tip}</marker>'
    back = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<defs>{marker}</defs>", back, *shapes, "</svg>", ""])


def draw_round() -> str:
    """A decode round: plan, draft steps over compressed KV, one verification over full KV."""
    steps = [(170 + 120 * i, f"t{i + 1}") for i in range(4)]
    verified = [("t1 accepted", "full"), ("t2 accepted", "full"), ("t3 rejected,\nbonus token u3", "lossy"), ("t4 dropped", "plain")]
    return svg(
        *(760, 330, "A decode round"),
        text(20, 45, "plan", "start"),
        box(170, 25, 450, 40, "for each request: draft, or decode on the full KV"),
        text(20, 125, "draft steps over\ncompressed KV", "start"),
        arrow((395, 65), (395, 80), (210, 80), (210, 103)),
        *(box(x, 105, 80, 40, name, "draft") for x, name in steps),
        *(arrow((x + 80, 125), (x + 118, 125)) for x, _ in steps[:3]),
        *(arrow((x + 40, 145), (x + 40, 183)) for x, _ in steps),
        text(20, 205, "verification over\nthe full KV", "start"),
        box(170, 185, 450, 40, "one forward computes all draft tokens, with the same noise", "full"),
        *(arrow((x + 40, 225), (x + 40, 258)) for x, _ in steps),
        text(20, 282, "output", "start"),
        *(box(x - 14, 260, 108, 44, words, kind) for (x, _), (words, kind) in zip(steps, verified, strict=True)),
        text(690, 282, "3 tokens in\nthis round", color=QUIET, size=12),
    )


def draw_kv_states() -> str:
    """Where the full KV of a request is."""
    return svg(
        *(820, 380, "States of full KV"),
        box(330, 150, 150, 60, "resident\nin SGLang's pool", "full"),
        box(40, 150, 150, 60, "arriving\nanchor, then residual", "draft"),
        box(330, 300, 150, 60, "host-offloaded", "full"),
        box(620, 90, 160, 60, "quantized-only", "lossy"),
        box(620, 210, 160, 60, "remote-only", "lossy"),
        box(330, 20, 150, 50, "evicted", "plain"),
        arrow((115, 60), (115, 148), label="from a prefill server", at=(115, 46)),
        arrow((190, 180), (328, 180), label="residual arrived", at=(259, 168)),
        arrow((405, 150), (405, 72), label="request ended,\nslots needed", at=(397, 112), anchor="end"),
        arrow((375, 210), (375, 298), label="stored, then freed", at=(366, 254), anchor="end"),
        arrow((435, 300), (435, 212), label="loaded for\na verification", at=(444, 254), anchor="start"),
        arrow((480, 165), (618, 120), label="freed (lossy):\nblocks hold all tokens", at=(540, 108)),
        arrow((480, 195), (618, 240), label="freed (lossy): a cache\nrank holds K and V", at=(590, 290)),
    )


def draw_prefill_decode() -> str:
    """A request between a prefill and a decode server."""
    left, right = 190, 570
    return svg(
        *(820, 400, "Prefill and decode servers"),
        box(left - 130, 20, 190, 40, "prefill server"),
        box(right - 60, 20, 190, 40, "decode server"),
        f'<line x1="{left}" y1="60" x2="{left}" y2="385" stroke="{QUIET}"/><line x1="{right}" y1="60" x2="{right}" y2="385" stroke="{QUIET}"/>',
        text(left - 14, 92, "forward of a chunk,\npages encoded", "end", size=12),
        arrow((left, 110), (right, 130), label="anchors of all pages", at=(380, 106)),
        text(right + 14, 132, "anchors written to\nthe request's slots", "start", size=12),
        arrow((left, 165), (right, 185), label="first token", at=(380, 161)),
        box(right - 8, 200, 16, 90, "", "draft"),
        text(right + 18, 230, "drafts on the anchor", "start", size=12),
        arrow((left, 215), (right - 8, 285), label="residuals", at=(340, 232)),
        text(right + 18, 284, "residual added in\nthe same slots", "start", size=12),
        box(right - 8, 305, 16, 40, "", "full"),
        text(right + 18, 326, "verification: the output\nis that of the full KV", "start", size=12),
        arrow((right, 370), (790, 370), label="tokens to the client", at=(690, 358)),
    )


DIAGRAMS = {"round.svg": draw_round, "kv-states.svg": draw_kv_states, "prefill-decode.svg": draw_prefill_decode}


def main() -> None:
    """Write all diagrams."""
    for name, draw in DIAGRAMS.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()
