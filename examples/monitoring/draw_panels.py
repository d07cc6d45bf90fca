"""Draws the dashboard's panels without Grafana, from a Prometheus that scraped a server.

    python examples/monitoring/draw_panels.py --minutes 5 --out panels.png

Panels without data are left out. An error in a query ends the command.
"""

import argparse
import json
import math
import time
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

DASHBOARD = Path(__file__).parent / "dashboard.json"
# Values of the dashboard's variables: all models and servers, rates over half a minute.
VARIABLES = {"$model": ".*", "$instance": ".*", "$__rate_interval": "30s"}


def series(prometheus: str, query: str, begin: float, end: float) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
    """Labels and points (seconds, value) of each series that a query gives, without series that are 0 or undefined throughout."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    url = f"{prometheus}/api/v1/query_range?{urlencode({'query': query, 'start': begin, 'end': end, 'step': 5})}"
    found = json.load(urlopen(url))["data"]["result"]
    points = [(each["metric"], [(float(at), float(value)) for at, value in each["values"]]) for each in found]
    return [(labels, values) for labels, values in points if any(value and math.isfinite(value) for _, value in values)]


def main() -> None:
    """Read the options, and draw the panels."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="address (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=5, help="length of the drawn time (default: %(default)s)")
    parser.add_argument("--end", type=float, default=time.time(), help="its end, in seconds since 1970 (default: now)")
    parser.add_argument("--out", default="panels.png", help="file to write (default: %(default)s)")
    args = parser.parse_args()
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: pass a number above 0")
    if not Path(args.out).parent.is_dir():
        parser.error(f"--out {args.out}: there is no folder {Path(args.out).parent}; pass a file in a folder that exists")
    try:
        draw(args, parser)
    except (URLError, ValueError) as error:
        parser.error(f"--prometheus {args.prometheus}: {error}; start Prometheus as examples/monitoring/README.md says, or pass its URL")


def draw(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Query all panels, and draw those with data. Ends with an error of ``parser`` if none has data."""
    begin, drawn = args.end - 60 * args.minutes, []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        lines = [
            (target["legendFormat"], labels, values)
            for target in panel.get("targets", ())
            for labels, values in series(args.prometheus, target["expr"], begin, args.end)
        ]
        drawn += [(panel["title"], lines)] if lines else []
    if not drawn:
        parser.error(f"{args.prometheus} has no data of the last {args.minutes:g} minutes: start a server with --enable-metrics")
    figure, axes = pyplot.subplots(math.ceil(len(drawn) / 3), 3, figsize=(15, 3 * math.ceil(len(drawn) / 3)), squeeze=False)
    for axis, (title, lines) in zip(axes.flat, drawn):
        for legend, labels, values in lines:
            for name, value in labels.items():
                legend = legend.replace("{{%s}}" % name, value)
            axis.plot([(at - begin) / 60 for at, _ in values], [value for _, value in values], label=legend)
        axis.set_title(title, fontsize=10)
        axis.legend(fontsize=7)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=8)
    for axis in axes.flat[len(drawn) :]:
        axis.axis("off")
    figure.supxlabel("minutes", fontsize=9)
    figure.tight_layout()
    figure.savefig(args.out, dpi=80)
    print(f"{args.out}: {len(drawn)} panels")


if __name__ == "__main__":
    main()
