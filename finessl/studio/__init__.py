"""The studio: label, train, review, audit and export in the browser. `finessl studio DATA`

project     the images, and the folder that holds the state
events      labels.jsonl: every action, replayed at start
features    features of all images, encoded in the background (encoder)
suggest     the frozen-feature answer, fitted again after each label; the queue
thumbnails  packed previews
training    `finessl train` in a process of its own
review, audit, exports
trained     what a finished run says of every image
session     all of it, as the values that the page shows
server      HTTP around the session; security guards it
"""
