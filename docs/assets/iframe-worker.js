// Browsers refuse a Worker for pages that are opened from the file system. There, and only there, a hidden frame takes its place,
// so that the search works offline: the script runs in the frame, and messages go to and fro as they would with a Worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const loading = "importScripts = function () {" +
        "  for (const url of arguments) document.write('<script src=\"' + url + '\"><\\/script>');" +
        "};" +
        "postMessage = (data) => parent.dispatchEvent(new MessageEvent('frame', { data, source: window }));";
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = `<script>${loading}</script><script src="${url}"></script>`;
      this.ready = new Promise((resolve) => this.frame.addEventListener("load", resolve));
      document.body.append(this.frame);
      addEventListener("frame", (event) => {
        if (event.source === this.frame.contentWindow)
          this.dispatchEvent(new MessageEvent("message", { data: event.data }));
      });
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
