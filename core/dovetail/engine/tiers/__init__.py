"""KV beyond the device: K and V of prefixes in host memory and in tiers.

`feature.TierFeature` is the engine feature. It saves computed K and V to the host pool
(`host_pool`) in *frames* of some hundred tokens (`saves`), passes the frames to the tiers
(`tier_jobs`), and restores them to the prefix cache before the policy sees a request (`restores`).
`keys` names frames. `prospect` decides whether restoring is quicker than computing.
"""
