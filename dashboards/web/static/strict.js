// Runs before plotly.js, which sets styles in two ways that the policy of the pages refuses: each
// has an equal that it allows.
"use strict";

(() => {
  // An attribute "style" becomes the same declarations, set by script.
  const set = Element.prototype.setAttribute;
  Element.prototype.setAttribute = function setAttribute(name, value) {
    if (name === "style") {
      this.style.cssText = value;
    } else {
      set.call(this, name, value);
    }
  };

  // A style element (of maps, which no page has) becomes an element that does nothing.
  const create = Document.prototype.createElement;
  Document.prototype.createElement = function createElement(name, ...more) {
    return create.call(this, name === "style" ? "template" : name, ...more);
  };
})();
