// The switch between the system's, light and dark colours, and colours for canvases.

const KEY = "tandem-theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };

const changes = new EventTarget();
const system = matchMedia("(prefers-color-scheme: dark)");
const probe = document.createElement("span");
let known = {};

function changed() {
  known = {};
  changes.dispatchEvent(new Event("change"));
}

export function startSwitch(button) {
  const show = () => {
    const theme = document.documentElement.dataset.theme;
    button.textContent = SIGNS[theme];
    button.title = `Theme: ${theme} (t)`;
    button.setAttribute("aria-label", button.title);
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = NEXT[document.documentElement.dataset.theme];
    localStorage.setItem(KEY, document.documentElement.dataset.theme);
    show();
    changed();
  });
  system.addEventListener("change", changed);
  probe.hidden = true;
  document.body.append(probe);
  show();
}

/** Calls when the colours have changed, until the signal aborts. */
export function onColors(call, signal) {
  changes.addEventListener("change", call, { signal });
}

/** The colour of a CSS variable such as "--line-1", as a canvas takes it. */
export function color(name) {
  if (!(name in known)) {
    probe.style.color = `var(${name})`;
    known[name] = getComputedStyle(probe).color;
  }
  return known[name];
}
