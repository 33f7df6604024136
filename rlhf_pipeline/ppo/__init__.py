"""Proximal policy optimisation for language models, on torch, transformers, peft and numpy alone.

Read in this order: settings, rollout, kl, advantages, loss, critic, trainer; then environment (the
one module that needs gymnasium too), replay, checkpoint, metrics, alarms, result, plots.
`trainer.train_ppo` is the entry.
"""
