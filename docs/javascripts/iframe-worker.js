// Search in a site that is opened from a folder. Browsers start no workers for pages of file://,
// so the script of the search runs in a hidden frame instead.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    this.frame.srcdoc = `<script src="${url}"></script>`;
    this.loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve));
    this.loaded.then(() => {
      this.frame.contentWindow.postMessage = (data) => this.deliver(this, data);
    });
    document.body.append(this.frame);
  }

  deliver(target, data) {
    target.dispatchEvent(new MessageEvent("message", { data }));
  }

  postMessage(data) {
    this.loaded.then(() => this.deliver(this.frame.contentWindow, data));
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
