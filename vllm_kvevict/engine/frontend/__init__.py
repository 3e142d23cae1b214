"""In the process that clients talk to: flags, refusals at start-up, checks of single requests, chats, stopping."""
