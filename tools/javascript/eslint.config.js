import js from "@eslint/js";

const INTO_MARKUP = "Texts of models and uploaders must never become markup: use el() of shared/viewer/dom.js.";

export default [
  { ignores: ["shared/viewer/uPlot.js", "**/node_modules/"] },
  js.configs.recommended,
  {
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      eqeqeq: "error",
      "no-eval": "error",
      "no-implied-eval": "error",
      "no-restricted-properties": ["error", ...["innerHTML", "outerHTML", "insertAdjacentHTML", "write"].map((property) => ({ property, message: INTO_MARKUP }))],
      "no-shadow": "error",
      "no-undef": "off", // tsc sees them, and knows what a browser has
      "no-var": "error",
      "object-shorthand": "error",
      "prefer-const": "error",
    },
  },
];
