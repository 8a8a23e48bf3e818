// A pipeline and the layers of its stages: a pass opens the layers of its stage in the figure that has them all.
const layersOf = (plot) => (plot.data || []).filter((trace) => trace.meta && "inside" in trace.meta);
const plots = () => [...document.querySelectorAll(".js-plotly-plot")];
function opens(inside) {
  for (const plot of plots().filter((one) => layersOf(one).length)) {
    window.Plotly.restyle(plot, { visible: plot.data.map((trace) => trace.meta.inside === inside) });
    plot.scrollIntoView({ block: "nearest" });
  }
}
function opened() { // buttons say what the figure shows, however it came to show it
  for (const plot of plots()) {
    if (!plot.opening && plot.on) {
      plot.opening = true;
      plot.on("plotly_click", ({ points: [{ customdata }] }) => customdata && customdata[1] >= 0 && opens(customdata[1]));
      plot.on("plotly_afterplot", opened);
    }
    const shown = layersOf(plot).find((trace) => trace.visible !== false);
    for (const button of shown ? document.querySelectorAll("[data-opens]") : []) {
      button.setAttribute("aria-pressed", Number(button.dataset.opens) === shown.meta.inside);
    }
  }
}
document.addEventListener("click", ({ target }) => {
  const button = target.closest("[data-opens]");
  if (button) opens(Number(button.dataset.opens));
});
