"""The page: controls on the left, views on the right. Its state is in its address; see ``assets/state.js``."""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from dash import ClientsideFunction, Dash, Input, Output, State, ctx, dcc, html, no_update
from dash.exceptions import PreventUpdate
from flask import Response

from cpsim.case.cluster import presets
from cpsim.errors import CpsimError
from cpsim.explore import views
from cpsim.explore.answers import DETAILED, Answers, Dropped, Known, KnownStep
from cpsim.explore.controls import (
    VIEWS,
    Control,
    controls,
    given_ranks,
    is_step,
    scenario_of,
    shown_strategy,
    state_of,
)
from cpsim.explore.door import Turns, check, page_of
from cpsim.prediction.standalone import standalone
from cpsim.report.caveats import caveats_html
from cpsim.report.front import front_html
from cpsim.report.page import TEMPLATES, asset, drawn, legend_html, shared_style, size_of
from cpsim.report.step_page import step_front
from cpsim.report.steps import step_recommendation
from cpsim.report.views import TITLES, View
from cpsim.report.words import case_text, documents_text, recommendation, unbroken

if TYPE_CHECKING:
    from cpsim.case.scenario import Scenario
    from cpsim.prediction.runs import Run
    from cpsim.report.figures import Figure

Values = Mapping[str, Any]

FIRST_S: Final = 0.15
"""How long a first answer waits to be whole before it is shown as it is."""
WHOLE_S: Final = 0.4
"""How long it waits where it is expected to be whole sooner: to draw it twice would take longer."""
MORE_S: Final = 0.3
"""How long a page that asks for more waits; it asks again as long as its answer is not whole."""
REDRAWN_S: Final = 0.9
"""How long a map that is not whole stays before it is drawn anew: its bar grows meanwhile, and cells come sooner."""
WHOLE_FILE_S: Final = 60.0
"""How long a file waits for a whole answer."""
LOADING: Final = "Loading costs and engines; after an installation they are compiled first, which takes minutes."
STEPPED: Final = ("nodes", "seed")
"""Numbers that make sense one up or down; what is typed elsewhere is said by Enter, or by leaving the field."""
THEMES: Final = ("light", "dark")
FIGURES: Final = "/plots.js"
"""Where the script of figures is, which reports have, too."""


def make_app(start: Scenario, runs: Sequence[Run], answers: Answers) -> Dash:
    """The page as a Dash application; everything that it loads comes from this machine.

    Args:
        start: the case that the page begins with.
        runs: real runs to set predictions beside.
        answers: where predictions come from.
    """
    app = Dash(__name__, title="cpsim explore", update_title="", serve_locally=True)
    known = controls(start)
    app.index_string = _index(app.index_string)
    app.server.add_url_rule(FIGURES, view_func=lambda: Response(asset("plots.js"), mimetype="text/javascript"))
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
    app.clientside_callback(
        ClientsideFunction("explore", "shown"),
        Output("written", "data"),
        Input("answered", "data"),
        State("html", "data"),
        prevent_initial_call=True,
    )

    def first_s() -> float:
        return WHOLE_S if answers.expected_s < 0.75 * WHOLE_S else FIRST_S

    def answer(state: Values, patience_s: float, draw: Callable[..., Any]) -> Known:
        scenario, view = scenario_of(state, known), str(state.get("view"))
        ranks = tuple(given_ranks(state, scenario.gpus)) if view in DETAILED else ()
        asked = page_of(state), view, shown_strategy(state), patience_s, partial(draw, view, ranks)
        try:
            return answers.ask(scenario, *asked, (str(state.get("across")), str(state.get("up"))))
        except Dropped as error:
            raise Dropped(f"{case_text(scenario)}: {error}") from None

    turns = Turns()

    def show(state: Any, _more: Any, answered: Any) -> dict[str, Any]:
        with turns.of(state):
            check(isinstance(answered, dict | None))
            return shown(state, answered)

    def shown(state: Values, answered: Values | None) -> dict[str, Any]:
        serial = state.get("serial")
        if not answers.is_warm:
            time.sleep(MORE_S)
            return _same(lead=LOADING, kind="lead wait", **_answered(serial, [0, 1]))
        more, theme = ctx.triggered_id == "more", str(state.get("theme"))
        try:
            found = step(state, more) if is_step(state) else answer(state, MORE_S if more else first_s(), views.drawn)
            pieces = [found.done, found.total]
            if more and answered and (answered.get("pieces") == pieces or _waits(state, found, answered)):
                return _same(done=found.done, total=found.total, **_answered(serial, pieces, answered.get("drawn")))
            said = _step_said(state, found) if isinstance(found, KnownStep) else _attention_said(state, found)
        except CpsimError as error:
            return _same(error=str(error), done=1, total=1, **_answered(serial, [1, 1]))
        return {"error": "", **_answered(serial, pieces), **_filled(said, theme)}

    def step(state: Values, more: bool) -> KnownStep:
        scenario = scenario_of(state, known)
        return answers.ask_step(scenario, page_of(state), str(state.get("view")), MORE_S if more else FIRST_S)

    def _attention_said(state: Values, found: Known) -> Said:
        return _said(found, views.make_view(state, found, runs, known))

    def download(_csv: Any, _scenario: Any, state: Any) -> dict[str, Any]:
        with turns.of(state):
            return file_of(state)

    def file_of(state: Values) -> dict[str, Any]:
        name = str(state.get("view"))
        try:
            if is_step(state):
                return step_file(answers.ask_step(scenario_of(state, known), page_of(state), name, WHOLE_FILE_S), state)
            if ctx.triggered_id == "csv" and name in DETAILED:
                return _file(f"cpsim-{name}.csv", answer(state, WHOLE_FILE_S, views.data_of).chosen or "")
            found = answer(state, WHOLE_FILE_S, views.drawn)
            view = views.make_view(state, found, runs, known)
            if ctx.triggered_id == "csv":
                return _file(f"cpsim-{name}.csv", views.csv_text(view.columns()))
            return scenario_file(views.chosen_case(found.advice, view))
        except Dropped:  # whose scenario the command line answers
            if ctx.triggered_id == "csv":
                raise PreventUpdate from None
            return scenario_file(scenario_of(state, known))
        except CpsimError:
            raise PreventUpdate from None

    app.callback(
        output=_places(),
        inputs={"state": Input("state", "data"), "_more": Input("more", "data")},
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
    texts = ("lead", "error", "case", "caption")
    return {name: Output(name, "children") for name in texts} | {
        "kind": Output("lead", "className"),
        "serial": Output("page", "data-answered"),
        "html": Output("html", "data"),
        "plots": [Output(name, "figure") for name in views.PLOTS],
        "shown": [Output(name, "style") for name in views.PLOTS],
        "done": Output("progress", "value"),
        "total": Output("progress", "max"),
        "answered": Output("answered", "data"),
    }


def _same(**changes: Any) -> dict[str, Any]:
    """All places as they are but for some."""
    kept = {name: [no_update] * len(at) if isinstance(at, list) else no_update for name, at in _places().items()}
    return kept | changes


def _answered(serial: Any, pieces: Sequence[int], drawn: float | None = None) -> dict[str, Any]:
    """Which question was answered, how far, and when that was drawn, if not now; different every time, so that the
    page knows that it was."""
    now = time.monotonic()
    return {"serial": serial, "answered": {"serial": serial, "pieces": pieces, "at": now, "drawn": drawn or now}}


def _waits(state: Values, found: Known | KnownStep, answered: Values) -> bool:
    """Whether a map gets its new cells a little later."""
    drawn = answered.get("drawn")
    fresh = isinstance(drawn, float) and time.monotonic() - drawn < REDRAWN_S
    return fresh and state.get("view") == "map" and isinstance(found, Known) and not found.is_complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An answer before it fills the page."""

    lead: str
    kind: str
    """``lead``, with ``none`` where nothing can run and ``wait`` where nothing is there yet."""
    case: Scenario | None
    front: str
    notes: Sequence[str]
    view: View
    found: Known | KnownStep


def _said(found: Known, view: View) -> Said:
    """An answer about attention."""
    return Said(
        lead=_lead(found),
        kind="lead" if found.advice.candidates else "lead none" if found.is_complete else "lead wait",
        case=found.advice.scenario,
        front=front_html(found.advice),
        notes=found.advice.notes,
        view=view,
        found=found,
    )


def _step_said(state: Values, found: KnownStep) -> Said:
    """An answer about a training step."""
    advice = found.advice
    if advice is None:
        words = "Ways to cut the step are being searched."
        return Said(lead=words, kind="lead wait", case=None, front="", notes=(), view=View(), found=found)
    meanwhile = "" if found.is_whole else " Cut as before; other ways are being searched."
    return Said(
        lead=step_recommendation(advice, brief=True) + meanwhile,
        kind="lead" if advice.candidates else "lead none",
        case=advice.scenario,
        front=step_front(advice),
        notes=advice.notes,
        view=views.step_view(state, advice, found.opened),
        found=found,
    )


def _filled(said: Said, theme: str) -> dict[str, Any]:
    """An answer as outputs of the page; a place without a figure is hidden."""
    made = [_themed(drawn(plot), theme) for plot in said.view.plots]
    missing = len(views.PLOTS) - len(made)
    sizes = [size_of(plot) for plot in made]
    legends = {f"{name}-legend": "" for name in views.PLOTS}
    legends |= {f"{name}-legend": legend_html(plot, name) for name, plot in zip(views.PLOTS, made, strict=False)}
    return {
        "lead": unbroken(said.lead),
        "kind": said.kind,
        "case": f"{case_text(said.case)}; {documents_text(said.case)}" if said.case else "",
        "done": said.found.done,
        "total": said.found.total,
        "caption": unbroken(said.view.caption),
        "html": {"front": said.front, "below": said.view.below, "notes": caveats_html(said.notes)} | legends,
        "plots": made + [no_update] * missing,
        "shown": sizes + [{"display": "none"}] * missing,
    }


def step_file(found: KnownStep, state: Values) -> dict[str, Any]:
    """The data of a view of a training step, or the scenario of what is recommended."""
    advice = found.advice
    if advice is None:
        raise PreventUpdate
    if ctx.triggered_id == "csv":
        view = views.step_view(state, advice, found.opened)
        return _file(f"cpsim-step-{state.get('view')}.csv", views.csv_text(view.columns()))
    best = advice.recommended
    return scenario_file(best.prediction.scenario if best else advice.scenario)


def _lead(found: Known) -> str:
    """The recommendation, how far it is, and what is left out of it."""
    words = recommendation(found.advice, brief=True)
    if not found.advice.candidates and not found.is_complete:
        words = "No strategy has an answer yet."
    elif not found.advice.candidates and found.dropped:
        words = "No answer: what could run this case costs more than the page spends."
    so_far = "" if found.is_complete else f" So far: {found.done} of {found.total} answers."
    return words + so_far + (f" Without {found.dropped}." if found.dropped else "")


def _themed(figure: Figure, theme: str) -> Figure:
    """The figure in the colours of the page."""
    colours = TEMPLATES["dark" if theme == "dark" else "light"]
    return {"data": figure["data"], "layout": figure["layout"] | {"template": colours, "autosize": True}}


def scenario_file(scenario: Scenario) -> dict[str, Any]:
    """The file that `cpsim advise` and `cpsim predict` read, anywhere: packed with a cluster and profile of its own."""
    files = standalone(scenario)
    if len(files) == 1:
        return _file(*next(iter(files.items())))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return dict(dcc.send_bytes(packed.getvalue(), "scenario.zip"))


def _file(name: str, text: str) -> dict[str, Any]:
    return {"filename": name, "content": text, "type": "text/plain"}


def _layout(known: Sequence[Control], start: Values) -> Any:
    extra = (Control(name="view", label="view", choices=VIEWS), Control(name="theme", label="theme", choices=THEMES))
    described = [
        {"name": one.name, "is_number": one.is_number, "of": one.of, "value": start[one.name]}
        for one in (*known, *extra)
    ]
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            dcc.Store(id="controls", data=described),
            dcc.Store(id="per-node", data={name: one.gpus_per_node for name, one in presets().items()}),
            dcc.Store(id="state"),
            dcc.Store(id="answered"),
            dcc.Store(id="more"),
            dcc.Store(id="html"),
            dcc.Store(id="written"),
            dcc.Download(id="download"),
            html.Header(
                [
                    html.A("Skip to the answer", href="#main", className="skip"),
                    html.H1("cpsim explore"),
                    html.Button("Change the case", id="change", type="button"),
                    _theme(),
                ]
            ),
            html.Aside([*(_control(one, start) for one in known)], id="case-controls", **{"aria-label": "The case"}),
            html.Main(
                [
                    html.P(id="error", role="alert"),
                    html.P(id="difference", role="status"),
                    html.Div([_current(), html.Div(id="pinned", role="group", **{"aria-label": "Pinned"})], id="both"),
                    html.Nav([_views(), _downloads()], **{"aria-label": "Views"}),
                    html.Div(
                        [
                            *(part for name in views.PLOTS for part in _place(name)),
                            html.P(id="caption", className="muted"),
                            html.Div(id="below"),
                        ],
                        id="panel",
                        role="tabpanel",
                        **{"aria-label": "View"},
                    ),
                    html.Div(id="notes"),
                ],
                id="main",
            ),
        ],
        id="page",
    )


def _current() -> Any:
    """The answer, beside which an earlier one may be pinned."""
    return html.Div(
        [
            html.P(id="case", className="muted"),
            html.P(id="lead", role="status", className="lead wait"),
            html.Progress(id="progress", value="0", max="1", **{"aria-label": "Answers so far"}),
            html.Div(id="front"),
        ],
        id="current",
    )


def _place(name: str) -> tuple[Any, Any]:
    """Where the legend of a figure comes, and the figure."""
    made = dcc.Graph(id=name, config={"displayModeBar": False, "responsive": True}, style={"display": "none"})
    return html.Div(id=f"{name}-legend", className="legend"), html.Div(made, className="wide", tabIndex="0")


def _control(one: Control, start: Values) -> Any:
    value = start[one.name]
    if one.choices:
        return _labelled(one, f"{one.name}-list", [_list(one), _hidden(one.name, str(value))])
    kind = {"type": "number", "min": 0} if one.name in STEPPED else {"type": "text", "debounce": True}
    return _labelled(one, one.name, [dcc.Input(value, id=one.name, placeholder=one.hint, **kind)])


def _labelled(one: Control, field: str, made: Sequence[Any]) -> Any:
    return html.Div([html.Label(one.label, htmlFor=field), *made], className="control", id=f"{one.name}-control")


def _list(one: Control) -> Any:
    """The browser's own list, which keyboards and readers of screens know; its value is that of a hidden field."""
    options = [html.Option(choice, value=choice) for choice in one.choices]
    return html.Select(options, id=f"{one.name}-list", **{"data-control": one.name})


def _views() -> Any:
    """Tabs; the value is that of a hidden field, so that it is a control like others."""
    tabs = [
        html.Button(TITLES[name], type="button", role="tab", **{"data-view": name, "aria-controls": "panel"})
        for name in VIEWS
    ]
    return html.Div([html.Div(tabs, id="views", role="tablist", **{"aria-label": "Views"}), _hidden("view", VIEWS[0])])


def _hidden(name: str, value: str) -> Any:
    return dcc.Input(value, id=name, type="hidden")


def _index(page: str) -> str:
    """The frame of the page, with its language and what it has in common with reports."""
    style = f'{{%css%}}<style>{shared_style()}</style><script src="{FIGURES}"></script>'
    return page.replace("<html>", '<html lang="en">').replace("{%css%}", style)


def _downloads() -> Any:
    return html.Div(
        [
            html.Button("Pin", id="pin", title="Keep this answer beside those of other cases"),
            html.Button("CSV", id="csv"),
            html.Button("Scenario file", id="scenario"),
        ]
    )


def _theme() -> Any:
    return html.Div([html.Button("Dark", id="dark", type="button"), _hidden("theme", "")])
