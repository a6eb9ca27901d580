// Search in a site that was opened from disk, where browsers start no workers: a worker that runs in an iframe.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      this.loaded = new Promise(loaded => script.addEventListener("load", loaded))
      script.src = url
      frame.contentDocument.body.append(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
