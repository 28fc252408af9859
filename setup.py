"""Packaging of memory_saving_gradients."""

from setuptools import find_packages, setup

#: The oldest and the newest release of TensorFlow that scripts/test_versions runs the tests on.
TESTED = ("2.16", "2.21")

setup(
    name="memory_saving_gradients",
    version="1.0.0",
    description="Train networks that do not fit into memory, on TensorFlow",
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["memory_saving_gradients", "memory_saving_gradients.*"]),
    install_requires=[
        f"tensorflow>={TESTED[0]},<={TESTED[1]}.99",
        "networkx>=3.0",
        "numpy",
        "rich",
        "scipy",
    ],
    entry_points={
        "console_scripts": ["memory-saving-gradients = memory_saving_gradients.__main__:main"]
    },
    extras_require={
        "demo": ["matplotlib", "rich", "scikit-learn"],
        "test": ["hypothesis", "keras-hub", "mypy", "pytest", "ruff", "tensorboard", "tf_keras"],
    },
)
