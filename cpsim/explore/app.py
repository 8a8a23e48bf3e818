"""The page: controls on the left, views on the right. Its state is in its address; see ``assets/state.js``."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml
from dash import ClientsideFunction, Dash, Input, Output, State, ctx, dcc, html, no_update
from dash.exceptions import PreventUpdate
from plotly import io as plotly_io

from cpsim.cluster import presets
from cpsim.errors import CpsimError
from cpsim.explore import views
from cpsim.explore.answers import Answers
from cpsim.explore.controls import VIEWS, Control, controls, scenario_of, state_of
from cpsim.report.words import case_text, recommendation

if TYPE_CHECKING:
    from cpsim.explore.views import View
    from cpsim.prediction import Advice
    from cpsim.runs import Run
    from cpsim.scenario import Scenario

Values = Mapping[str, Any]

TICK_MS: Final = 400
"""How often a page asks for more while its answer is not complete."""
LOADING: Final = "Loading costs and engines; after an installation they are compiled first, which takes minutes."
STEPPED: Final = ("nodes", "seed")
"""Numbers that make sense one up or down; what is typed elsewhere is said by Enter, or by leaving the field."""
THEMES: Final = ("light", "dark")
LABELS: Final = {
    "ranking": "Ranking", "map": "Where the best changes", "timeline": "Timeline", "memory": "Memory",
    "mask": "Mask and shards", "measured": "Predicted and measured",
}  # fmt: skip


def make_app(start: Scenario, runs: Sequence[Run], answers: Answers, folder: Path) -> Dash:
    """The page as a Dash application; everything that it loads comes from this machine.

    Args:
        start: the case that the page begins with.
        runs: real runs to set predictions beside.
        answers: where predictions come from.
        folder: for files of clusters with another network.
    """
    app = Dash(__name__, title="cpsim explore", update_title="", serve_locally=True)
    known = controls(start)
    app.layout = _layout(known, {**state_of(start), "view": VIEWS[0], "theme": ""})
    names = [control.name for control in known] + ["view", "theme"]
    app.clientside_callback(
        ClientsideFunction("explore", "sync"),
        Output("url", "search"),
        *(Output(name, "value") for name in names),
        Output("state", "data"),
        Input("url", "search"),
        *(Input(name, "value") for name in names),
        State("controls", "data"),
        State("per-node", "data"),
    )


    def show(state: Values, _ticks: int, answered: Sequence[Any] | None) -> dict[str, Any]:
        if not answers.is_warm:
            return _same(lead=LOADING, complete=False)
        try:
            scenario = scenario_of(state, known, folder)
            advice, job = answers.advice(scenario, str(state.get("page")))
            pieces = views.pieces(state, advice, answers)
            number = [len(job.done), *pieces, state.get("serial")]
            if ctx.triggered_id == "tick" and answered == number:
                return _same()
            view = views.make(state, advice, answers, runs, known)
        except CpsimError as error:
            return _same(error=str(error), complete=True, answered=None, done=1, total=1, serial=state.get("serial"))
        said = _said(advice, [len(job.done), len(job.pieces)], pieces)
        shown = _shown(view, str(state.get("theme")))
        return _same(error="", answered=number, serial=state.get("serial"), **said, **shown)

    def download(_csv: int, _scenario: int, state: Values) -> dict[str, Any]:
        try:
            advice, _ = answers.advice(scenario_of(state, known, folder), str(state.get("page")), patience_s=60)
            view = views.make(state, advice, answers, runs, known)
        except CpsimError:
            raise PreventUpdate from None
        if ctx.triggered_id == "csv":
            return _file(f"cpsim-{state.get('view')}.csv", views.csv_text(view.columns))
        return scenario_file(view.scenario)

    app.callback(
        output=_places(),
        inputs={"state": Input("state", "data"), "_ticks": Input("tick", "n_intervals")},
        state={"answered": State("answered", "data")},
        prevent_initial_call=True,
    )(show)
    app.callback(
        Output("download", "data"),
        Input("csv", "n_clicks"),
        Input("scenario", "n_clicks"),
        State("state", "data"),
        prevent_initial_call=True,
    )(download)
    return app


def _places() -> dict[str, Any]:
    """What an answer fills in."""
    texts = ("lead", "error", "notes", "case", "caption", "below")
    return {name: Output(name, "children") for name in texts} | {
        "serial": Output("page", "data-answered"),
        "plots": [Output(name, "figure") for name in views.PLOTS],
        "shown": [Output(name, "style") for name in views.PLOTS],
        "done": Output("progress", "value"),
        "total": Output("progress", "max"),
        "complete": Output("tick", "disabled"),
        "answered": Output("answered", "data"),
    }


def _same(**changes: Any) -> dict[str, Any]:
    """All places as they are but for some."""
    kept = {name: [no_update] * len(at) if isinstance(at, list) else no_update for name, at in _places().items()}
    return kept | changes


def _said(advice: Advice, tried: Sequence[int], pieces: Sequence[int]) -> dict[str, Any]:
    """What the page says of its case so far; ``tried`` and ``pieces`` of the view are (done, total)."""
    whole = tried[0] == tried[1]
    lead = recommendation(advice) + ("" if whole else f" So far: {tried[0]} of {tried[1]} ways tried.")
    return {
        "lead": lead, "notes": views.notes(advice), "case": case_text(advice.scenario),
        "complete": whole and pieces[0] == pieces[1], "done": tried[0] + pieces[0], "total": tried[1] + pieces[1],
    }  # fmt: skip


def _shown(view: View, theme: str) -> dict[str, Any]:
    """The view as outputs of the page; a place without a figure is hidden."""
    made = [_themed(plot, theme) for plot in view.plots]
    missing = len(views.PLOTS) - len(made)
    heights = [{"height": f"{plot['layout']['height']}px"} for plot in made]
    return {
        "plots": made + [no_update] * missing, "shown": heights + [{"display": "none"}] * missing,
        "caption": view.caption, "below": view.below,
    }  # fmt: skip


def _themed(figure: Any, theme: str) -> dict[str, Any]:
    """The figure as plain values on the page's own ground; plotly would check and copy every value of a template."""
    plain: dict[str, Any] = figure.to_plotly_json()
    clear = "rgba(0,0,0,0)"
    plain["layout"] |= {
        "template": _template(theme), "paper_bgcolor": clear, "plot_bgcolor": clear, "autosize": True,
    }  # fmt: skip
    return plain


@cache
def _template(theme: str) -> dict[str, Any]:
    values: dict[str, Any] = plotly_io.templates["plotly_dark" if theme == "dark" else "plotly_white"].to_plotly_json()
    return values


def scenario_file(scenario: Scenario) -> dict[str, Any]:
    """The file that `cpsim advise` and `cpsim predict` read; with the file of its cluster where it has its own."""
    fields = scenario.to_dict()
    cluster = Path(scenario.cluster)
    if scenario.cluster in presets():
        return _file("scenario.yaml", _yaml(fields))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("scenario.yaml", _yaml(fields | {"cluster": cluster.name}))
        archive.writestr(cluster.name, cluster.read_text(encoding="utf-8"))
    return dict(dcc.send_bytes(packed.getvalue(), "scenario.zip"))


def _yaml(fields: Mapping[str, Any]) -> str:
    left_out = {name: value for name, value in fields.items() if value not in ({}, None)}
    return str(yaml.safe_dump(left_out, sort_keys=False))


def _file(name: str, text: str) -> dict[str, Any]:
    return {"filename": name, "content": text, "type": "text/plain"}


def _layout(known: Sequence[Control], start: Values) -> Any:
    extra = (Control(name="view", label="view", choices=VIEWS), Control(name="theme", label="theme", choices=THEMES))
    described = [
        {"name": one.name, "is_number": one.is_number, "value": start[one.name]} for one in (*known, *extra)
    ]
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            dcc.Store(id="controls", data=described),
            dcc.Store(id="per-node", data={name: one.gpus_per_node for name, one in presets().items()}),
            dcc.Store(id="state"),
            dcc.Store(id="answered"),
            dcc.Interval(id="tick", interval=TICK_MS, disabled=True),
            dcc.Download(id="download"),
            html.Aside([html.H1("cpsim explore"), *(_control(one, start) for one in known), _theme()]),
            html.Main([
                html.P(id="case", className="muted"),
                html.P(id="error", role="alert"),
                html.P(id="lead", role="status"),
                html.Progress(id="progress", value="0", max="1"),
                html.Nav([_views(), _downloads()]),
                *(dcc.Graph(id=name, config={"displayModeBar": False, "responsive": True}, style={"display": "none"})
                  for name in views.PLOTS),
                html.P(id="caption", className="muted"),
                html.Div(id="below"),
                html.Details([html.Summary("Know this before you rely on it"), html.Div(id="notes")], open=True),
            ]),
        ],
        id="page",
    )  # fmt: skip


def _control(one: Control, start: Values) -> Any:
    value = start[one.name]
    if one.choices:
        made = dcc.Dropdown(list(one.choices), value, id=one.name, clearable=False, searchable=False)
    else:
        kind = {"type": "number", "min": 0} if one.name in STEPPED else {"type": "text", "debounce": True}
        made = dcc.Input(value, id=one.name, placeholder=one.hint, **kind)
    return html.Div([html.Label(one.label, htmlFor=one.name), made], className="control")


def _views() -> Any:
    return dcc.RadioItems([{"label": LABELS[name], "value": name} for name in VIEWS], VIEWS[0], id="view", inline=True)


def _downloads() -> Any:
    return html.Div([html.Button("CSV", id="csv"), html.Button("Scenario file", id="scenario")])


def _theme() -> Any:
    return html.Div([html.Label("theme"), dcc.RadioItems(list(THEMES), id="theme", inline=True)], className="control")

