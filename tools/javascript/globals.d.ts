// Types of the server's records, and of the plotting library.

/** The answers of the server by the names of their classes in shared/api/, from which `make lint-js` generates them. */
type Api = import("./build/api").components["schemas"];

/** shared/viewer/uPlot.js, a script of its own. */
declare const uPlot: any;
