"""All compression methods on one model and one prompt set: acceptance, bytes read by a draft step, speed."""
