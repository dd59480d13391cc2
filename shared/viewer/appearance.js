// The switch between system, light and dark colours; CSS colours for canvases.

const KEY = "tandem-theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };

const changes = new EventTarget();
const system = matchMedia("(prefers-color-scheme: dark)");
const probe = document.createElement("span");
/** @type {Record<string, string>} */
let resolved = {};

function changed() {
  resolved = {};
  changes.dispatchEvent(new Event("change"));
}

export function startSwitch(button) {
  const show = () => {
    const { theme } = document.documentElement.dataset;
    button.textContent = SIGNS[theme ?? "auto"];
    button.title = `Theme: ${theme} (t)`;
    button.setAttribute("aria-label", button.title);
  };
  button.addEventListener("click", () => {
    const { dataset } = document.documentElement;
    const theme = NEXT[dataset.theme ?? "auto"];
    dataset.theme = theme;
    localStorage.setItem(KEY, theme);
    show();
    changed();
  });
  system.addEventListener("change", changed);
  probe.hidden = true;
  document.body.append(probe);
  show();
}

/** Calls `call` whenever the colours change, until the signal aborts. */
export function onColors(call, signal) {
  changes.addEventListener("change", call, { signal });
}

/** The value of a CSS colour variable such as "--line-1", in the form that a canvas accepts. */
export function color(name) {
  if (!(name in resolved)) {
    probe.style.color = `var(${name})`;
    resolved[name] = getComputedStyle(probe).color;
  }
  return resolved[name];
}
