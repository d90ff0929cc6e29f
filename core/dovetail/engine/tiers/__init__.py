"""KV beyond the device: K and V of prefixes in host memory and in tiers.

`feature.TierFeature` is the loop's part. It saves what steps have computed in *frames* of some
hundred tokens (`saves`) to the host pool (`host_pool`), passes these to the tiers (`tier_jobs`),
and restores them to the prefix cache before a request is shown to the policy (`restores`). `keys`
names frames.
"""
