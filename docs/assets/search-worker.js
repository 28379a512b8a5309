// A page that was opened from the disk may not start a worker. The search of the theme then runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.append(frame)
      this.window = frame.contentWindow
      this.window.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      this.ready = new Promise(resolve => script.addEventListener("load", resolve))
      script.src = url
      frame.contentDocument.body.append(script)
    }
    postMessage(data) {
      this.ready.then(() => this.window.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
