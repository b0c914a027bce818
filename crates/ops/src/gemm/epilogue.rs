//! What is added to a product.

use devcomm_kernels::gemm::epilogue::{self, FusedArgs};

use crate::prelude::*;

/// A function of each sum, after the bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// GELU's `tanh` approximation, `x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2`.
    /// PyTorch: `gelu(x, approximate="tanh")`. cuBLASLt: `CUBLASLT_EPILOGUE_GELU`.
    Gelu,
    /// SiLU, `x * sigmoid(x)`, also known as Swish.
    Silu,
}

impl Activation {
    /// Returns the factors of `x` and `x^3` in the sigmoid's argument.
    fn factors(self) -> [f32; 2] {
        match self {
            Self::Gelu => epilogue::GELU,
            Self::Silu => epilogue::SILU,
        }
    }
}

/// The epilogue as an argument of kernels, with addresses.
pub(crate) type EpilogueArgs = FusedArgs<u64, u64, u64, u64, f32, f32>;

/// Bias, activation and residual of a product, if it has them.
#[derive(Clone)]
pub(crate) struct Added<O> {
    pub(crate) bias: Option<DeviceSlice<O>>,
    pub(crate) activation: Option<Activation>,
    pub(crate) residual: Option<DeviceSlice<O>>,
}

impl<O> Added<O> {
    pub(crate) const NOTHING: Self = Self { bias: None, activation: None, residual: None };

    /// Returns the argument for a product of `m x n` elements, without scales.
    pub(crate) fn args(&self, context: &Context, [m, n]: [usize; 2]) -> Result<EpilogueArgs> {
        let address = |name, slice: &Option<_>, rows| {
            slice.as_ref().map_or(Ok(0), |slice| address(context, name, slice, rows, n))
        };
        // An address of 0 stands for no such buffer, a `linear` of 0 for no activation.
        let [linear, cubic] = self.activation.map_or([0.0; 2], Activation::factors);
        Ok(FusedArgs {
            scale_a: 0,
            scale_b: 0,
            bias: address("the bias", &self.bias, 1)?,
            residual: address("the residual", &self.residual, m)?,
            linear,
            cubic,
        })
    }
}
