"""Images that users send: read, decoded and prepared, in processes of their own.

`sources` reads what requests carry. `fetching` gets images by URL. `processes` has the processes
that decode, and `worker` is what runs there. `layouts` has the tokens of an image for each type of
model. `prompts` brings the images of a prompt and its tokens together.
"""
