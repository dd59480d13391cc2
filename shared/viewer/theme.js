// A plain script in the head, so that the chosen colours hold before anything is drawn. appearance.js changes them.
document.documentElement.dataset.theme = localStorage.getItem("tandem-theme") ?? "auto";
