// What the page shows is in its address: controls write it, and a link restores them.
const page = Math.random().toString(36).slice(2); // of this tab: it looks at one case at a time
let serial = 0; // of what was asked last; the page says to which the answer belongs that it shows

window.dash_clientside = Object.assign({}, window.dash_clientside, {
  explore: {
    // Arguments: the address, one value for every control, then the controls themselves and GPUs of a cluster's node.
    sync: function (search, ...rest) {
      const [controls, perNode] = rest.slice(-2);
      const values = Object.fromEntries(controls.map((control, i) => [control.name, rest[i]]));
      const context = window.dash_clientside.callback_context;
      const changed = context.triggered.map((entry) => entry.prop_id.split(".")[0]);
      const fromLink = changed.length === 0 || changed.includes("url");
      const state = fromLink ? fromAddress(search, controls) : values;
      const node = perNode[state.cluster] || 8;
      if (!fromLink && changed.includes("nodes") && state.nodes > 0) {
        state.gpus = state.nodes * node;
      } else if (Number(state.gpus) > 0) {
        state.nodes = Math.ceil(Number(state.gpus) / node);
      }
      state.page = page;
      state.serial = ++serial;
      document.documentElement.dataset.asked = serial;
      document.documentElement.dataset.theme = state.theme;
      document.getElementById("dark").textContent = state.theme === "dark" ? "Light" : "Dark";
      select(state.view, state.task.includes("step"));
      const drawn = !["one document", "lengths"].includes(state.documents);
      const mapped = state.view === "map";
      const counting = { lengths: state.documents === "lengths", seed: drawn, across: mapped, up: mapped };
      for (const { name, of } of controls) {
        const place = document.getElementById(name + "-control");
        if (place) {
          place.hidden = (of && of !== state.task) || counting[name] === false;
        }
      }
      for (const list of document.querySelectorAll("[data-control]")) {
        list.value = state[list.dataset.control];
      }
      const same = window.dash_clientside.no_update;
      const linked = (name) => fromLink || name === "gpus" || name === "nodes";
      const shown = controls.map((control) => (linked(control.name) ? state[control.name] : same));
      return [toAddress(state, controls), ...shown, state];
    },
    // Arguments: which question was answered and how far, and what was answered as HTML; asks for more until it is whole.
    shown: function (answered, html) {
      for (const [name, text] of Object.entries(html || {})) {
        const place = document.getElementById(name);
        if (place.shown !== text) {
          place.innerHTML = place.shown = text;
        }
      }
      document.getElementById("progress").classList.toggle("whole", answered.pieces[0] >= answered.pieces[1]);
      compare();
      opened();
      if (answered.serial === serial && answered.pieces[0] < answered.pieces[1]) {
        window.dash_clientside.set_props("more", { data: answered.at });
      }
      return answered.serial;
    },
  },
});

function fromAddress(search, controls) {
  const given = new URLSearchParams(search || "");
  const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
  const state = {};
  for (const control of controls) {
    let value = given.has(control.name) ? given.get(control.name) : control.value;
    if (control.name === "theme" && !given.has("theme")) {
      value = dark ? "dark" : "light";
    }
    state[control.name] = control.is_number && value !== "" && Number.isFinite(Number(value)) ? Number(value) : value;
  }
  return state;
}

function toAddress(state, controls) {
  const written = new URLSearchParams();
  for (const control of controls) {
    const value = state[control.name];
    if (control.name !== "nodes" && value !== null && value !== undefined && value !== "") {
      written.set(control.name, value);
    }
  }
  return "?" + written.toString();
}

// Lists are the browser's own; what is chosen is said by the hidden field beside each.
document.addEventListener("change", (event) => {
  const list = event.target.closest("[data-control]");
  if (list) {
    window.dash_clientside.set_props(list.dataset.control, { value: list.value });
  }
});

// Tables offer strategies that were left out, and link to other cases: neither loads the page again.
document.addEventListener("click", (event) => {
  const offer = event.target.closest("[data-strategy]"), link = event.target.closest("#below a");
  const tab = event.target.closest("[data-view]"); // or a link to one
  if (tab) {
    event.preventDefault();
    window.dash_clientside.set_props("view", { value: tab.dataset.view });
  } else if (event.target.closest("#dark")) {
    const dark = document.documentElement.dataset.theme === "dark";
    window.dash_clientside.set_props("theme", { value: dark ? "light" : "dark" });
  } else if (event.target.closest("#pin")) {
    pin();
  } else if (event.target.closest("#change")) {
    const shown = document.getElementById("page").classList.toggle("changing");
    event.target.setAttribute("aria-expanded", shown);
  } else if (offer) {
    window.dash_clientside.set_props("strategy", { value: offer.dataset.strategy });
  } else if (link) {
    event.preventDefault();
    history.pushState(null, "", link.getAttribute("href"));
    window.dispatchEvent(new PopStateEvent("popstate"));
  }
});

// Arrows go from tab to tab, as ARIA has it.
document.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], tab = event.target.closest("#views [data-view]");
  if (tab && step) {
    const tabs = [...tab.parentElement.children].filter((one) => !one.hidden);
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  }
});

const OF_ATTENTION = ["map", "mask", "measured"], OF_STEPS = ["paste"];

function select(view, isStep) {
  const missing = isStep ? OF_ATTENTION : OF_STEPS;
  const shown = missing.includes(view) ? "ranking" : view;
  for (const tab of document.querySelectorAll("#views [data-view]")) {
    const chosen = tab.dataset.view === shown;
    tab.hidden = missing.includes(tab.dataset.view);
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen) { // in a row of tabs that is wider than the screen
      tab.parentElement.scrollLeft = tab.offsetLeft - tab.parentElement.offsetLeft - 40;
    }
  }
}

// An answer that is pinned stays beside those of other cases, with what is otherwise and how much faster it is.
let pinned = null;

function pin() {
  const place = document.getElementById("pinned");
  pinned = pinned ? null : { address: new URLSearchParams(location.search), perToken: perToken() };
  place.innerHTML = "";
  if (pinned) {
    for (const name of ["case", "lead", "front"]) {
      const copy = document.getElementById(name).cloneNode(true);
      copy.removeAttribute("id");
      copy.removeAttribute("role");
      place.append(copy);
    }
    const link = document.createElement("a");
    link.href = location.href;
    link.textContent = "Back to this case";
    place.append(link);
  }
  document.getElementById("both").classList.toggle("pinned", pinned !== null);
  document.getElementById("pin").textContent = pinned ? "Unpin" : "Pin";
  compare();
}

function perToken() {
  const front = document.querySelector("#current .front");
  return front ? Number(front.dataset.perToken) : NaN;
}

function compare() {
  const place = document.getElementById("difference");
  if (!pinned) {
    place.textContent = "";
    return;
  }
  const now = new URLSearchParams(location.search), names = new Set([...pinned.address.keys(), ...now.keys()]);
  const changed = [...names]
    .filter((name) => !["view", "theme"].includes(name) && pinned.address.get(name) !== now.get(name))
    .map((name) => `${name} ${pinned.address.get(name) ?? "none"} → ${now.get(name) ?? "none"}`);
  const ratio = perToken() / pinned.perToken;
  const percent = (Math.abs(1 / ratio - 1) * 100).toFixed(1);
  const faster = `${percent} % ${ratio < 1 ? "more" : "fewer"}`;
  const speed = Number.isFinite(ratio) ? `: ${faster} tokens a second than pinned` : "";
  place.textContent = changed.length ? `Changed since pinned: ${changed.join(", ")}${speed}.` : "Pinned: change something.";
}
