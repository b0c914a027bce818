//! devcomm from Python: the module `devcomm._devcomm`, whose names the package `devcomm` has.
//!
//! Every call that may wait is made without the GIL (`own::detached`).

mod array;
mod collectives;
mod communicator;
mod errors;
mod gemm;
mod kernels;
mod nccl;
mod operand;
mod own;
mod store;
mod stream;
mod window;
mod world;

/// The classes and functions of the package.
#[pyo3::pymodule]
mod _devcomm {
    #[pymodule_export]
    use crate::collectives::PyCollectives;
    #[pymodule_export]
    use crate::communicator::{PyCommunicator, PyDevComm};
    #[pymodule_export]
    use crate::gemm::{PyGemm, PyGemmAllReduce};
    #[pymodule_export]
    use crate::kernels::PyKernelSet;
    #[pymodule_export]
    use crate::nccl::load_nccl;
    #[pymodule_export]
    use crate::own::forget;
    #[pymodule_export]
    use crate::window::PyWindow;
    #[pymodule_export]
    use crate::world::{PyRank, PyWorld};
}
