"""The InferScale operator: MemoryStore and PersonalizedModel to encoding jobs and servers.

Arrows run main, local -> handlers -> cluster, planner -> desired -> api. ``api``, ``desired`` and
``planner`` are pure: no kopf, no client, no clock.
"""
