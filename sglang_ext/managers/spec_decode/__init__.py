"""One round of verified decoding: who drafts, who answers, who is verified; the forwards, and what SGLang is told."""
