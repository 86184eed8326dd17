"""chat: conversations as documents whose loss is on what the assistant writes."""
