// A plain script in the head, so that the theme is set before anything is drawn. appearance.js changes it.
document.documentElement.dataset.theme = localStorage.getItem("tandem-theme") ?? "auto";
