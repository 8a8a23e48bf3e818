// Figures: legends hide and show what they name, and a pass of a pipeline opens the layers of its stage.
const plots = () => [...document.querySelectorAll(".js-plotly-plot")];
const groupOf = (trace) => trace.legendgroup || trace.name;
const layersOf = (plot) => (plot.data || []).filter((trace) => trace.meta && "inside" in trace.meta);
const buttonsOf = (plot) => [...document.querySelectorAll("[data-group]")].filter((one) => document.getElementById(one.dataset.plot)?.contains(plot));
function seen(plot) { // draws what is neither hidden nor of layers that are closed
  const hidden = plot.hiddenGroups || new Set();
  const wanted = plot.data.map((trace) => !hidden.has(groupOf(trace)) && (!layersOf(plot).includes(trace) || trace.meta.inside === (plot.inside || 0)));
  if (wanted.some((one, i) => one !== (plot.data[i].visible !== false))) window.Plotly.restyle(plot, { visible: wanted });
}
function opens(inside) {
  for (const plot of plots().filter((one) => layersOf(one).length)) {
    plot.inside = inside;
    seen(plot);
    plot.scrollIntoView({ block: "nearest" });
  }
}
function opened() { // buttons say what figures show, however they came to show it
  for (const plot of plots()) {
    if (!plot.opening && plot.on) {
      plot.opening = true;
      plot.on("plotly_click", ({ points: [{ customdata }] }) => customdata && customdata[1] >= 0 && opens(customdata[1]));
      plot.on("plotly_afterplot", opened);
    }
    for (const button of buttonsOf(plot)) button.setAttribute("aria-pressed", !plot.hiddenGroups?.has(button.dataset.group));
    if (plot.hiddenGroups?.size) seen(plot);
    const shown = layersOf(plot).find((trace) => trace.visible !== false);
    for (const button of shown ? document.querySelectorAll("[data-opens]") : []) {
      button.setAttribute("aria-pressed", Number(button.dataset.opens) === shown.meta.inside);
    }
  }
}
function hides(button, alone) {
  for (const plot of plots().filter((one) => buttonsOf(one).includes(button))) {
    const all = buttonsOf(plot).map((one) => one.dataset.group), mine = button.dataset.group;
    const hidden = plot.hiddenGroups || new Set();
    const others = all.filter((group) => group !== mine);
    const isAlone = !hidden.has(mine) && others.every((group) => hidden.has(group));
    plot.hiddenGroups = alone ? new Set(isAlone ? [] : others) : hidden.has(mine) ? new Set([...hidden].filter((group) => group !== mine)) : new Set([...hidden, mine]);
    seen(plot);
    opened();
  }
}
document.addEventListener("click", ({ target }) => {
  const layers = target.closest("[data-opens]"), name = target.closest("[data-group]");
  if (layers) opens(Number(layers.dataset.opens));
  if (name) hides(name, false);
});
document.addEventListener("dblclick", ({ target }) => {
  const name = target.closest("[data-group]");
  if (name) hides(name, true);
});
