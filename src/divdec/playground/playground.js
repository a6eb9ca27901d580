// Positions the box of a token beside it and within the window; the style shows and hides the box.
(() => {
  const position = (event) => {
    const token = event.target.closest?.(".dd-token");
    const box = token?.querySelector(":scope > .dd-box");
    if (!box) return;
    const line = token.getClientRects()[0];
    const width = box.offsetWidth, height = box.offsetHeight;
    const left = Math.min(Math.max(8, line.left), Math.max(8, window.innerWidth - width - 8));
    const below = line.bottom + 6 + height <= window.innerHeight;
    box.style.left = `${left}px`;
    box.style.top = `${below ? line.bottom + 6 : Math.max(8, line.top - height - 6)}px`;
  };
  document.addEventListener("mouseover", position);
  document.addEventListener("focusin", position);
})();
