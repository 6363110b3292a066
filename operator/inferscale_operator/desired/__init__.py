"""From a custom resource to the manifests of its children; pure: same input, same bytes."""
