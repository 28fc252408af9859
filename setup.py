"""Packaging of memory_saving_gradients."""

from pathlib import Path

from setuptools import find_packages, setup

#: The oldest and the newest release of TensorFlow that scripts/test_versions runs the tests on.
TESTED = ("2.16", "2.21")

FIGURES = ["matplotlib"]
BOARD = ["tensorboard"]
#: XLA's compiler for GPUs that need not be there; its door is a private one, so of one release.
XLA_GPU = ["jax", "jax-cuda12-plugin", "jax-cuda12-pjrt"]
#: What GPflow reads. It asks for numpy 1 and works with 2: scripts/test installs it by itself.
GPFLOW = ["check-shapes", "deprecated", "multipledispatch", "tabulate"]
#: Whose models the slow tests train; transformers 5 has no TensorFlow.
ZOO = [*GPFLOW, "tensorflow-probability[tf]", "transformers<5"]

setup(
    name="memory_saving_gradients",
    version="1.2.0",
    description="Train networks that do not fit into memory, on TensorFlow",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 5 - Production/Stable",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    keywords="tensorflow keras memory gradient-checkpointing rematerialization",
    project_urls={
        "The idea, on TensorFlow 1": "https://github.com/cybertronai/gradient-checkpointing",
        "The paper": "https://arxiv.org/abs/1604.06174",
    },
    python_requires=">=3.11",
    packages=find_packages(include=["memory_saving_gradients", "memory_saving_gradients.*"]),
    package_data={"memory_saving_gradients": ["py.typed", "report/timeline.html"]},
    install_requires=[
        f"tensorflow>={TESTED[0]},<={TESTED[1]}.99",
        "llvmlite",
        "networkx>=3.0",
        "numba",
        "numpy",
        "rich",
        "scipy",
    ],
    entry_points={
        "console_scripts": ["memory-saving-gradients = memory_saving_gradients.__main__:main"]
    },
    extras_require={
        "plot": FIGURES,
        "tensorboard": BOARD,
        "gpu": [f"tensorflow[and-cuda]>={TESTED[0]},<={TESTED[1]}.99"],
        "xla-gpu": [*(f"{name}==0.10.*" for name in XLA_GPU), "nvidia-cuda-nvcc-cu12"],
        "demo": [*FIGURES, "scikit-learn"],
        "test": [
            *FIGURES,
            *BOARD,
            "build",
            "hypothesis",
            "import-linter",
            "keras-hub",
            "mypy",
            "pytest",
            "pytest-xdist",
            "ruff",
            "tf_keras",
        ],
        "zoo": ZOO,
        "docs": ["mkdocs-material", "mkdocstrings[python]"],
    },
)
