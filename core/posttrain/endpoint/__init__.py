"""An OpenAI-compatible endpoint in front of an engine, and sessions that record what an agent asks there, to the token.

    endpoint = Endpoint(engine, packer, max_model_len=4096, model="posttrain")
    await endpoint.start(port=8100)
    async with endpoint.open(sampling=Sampling(max_tokens=256), seed=1) as session:
        await any_agent(session.base_url, session.api_key, endpoint.model)
    session.trajectory()          # ids, mask, log-probs and versions of all that the model said
"""
