// Puts a token's box beside it and within the window. The boxes themselves are shown by the style alone.
(() => {
  const place = (event) => {
    const token = event.target.closest?.(".dd-token");
    const box = token?.querySelector(":scope > .dd-box");
    if (!box) return;
    const at = token.getClientRects()[0];
    const width = box.offsetWidth, height = box.offsetHeight;
    const left = Math.min(Math.max(8, at.left), Math.max(8, window.innerWidth - width - 8));
    const below = at.bottom + 6 + height <= window.innerHeight;
    box.style.left = `${left}px`;
    box.style.top = `${below ? at.bottom + 6 : Math.max(8, at.top - height - 6)}px`;
  };
  document.addEventListener("mouseover", place);
  document.addEventListener("focusin", place);
})();
