//! devcomm from Python: the module `devcomm._devcomm`, whose names the package `devcomm` has.
//!
//! Every call that may wait is made without the GIL (`own::detached`), and signals end it
//! (`signals::waiting`).

mod array;
mod collectives;
mod communicator;
mod debug;
mod errors;
mod expert_parallel;
mod fused;
mod gemm;
mod grouped;
mod kernels;
mod nccl;
mod operand;
mod own;
mod products;
mod signals;
mod store;
mod stream;
mod window;
mod world;

/// The classes and functions of the package.
#[pyo3::pymodule]
mod _devcomm {
    use pyo3::prelude::*;

    /// Wheels with NCCL are looked for among this interpreter's packages, where torch has its own.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        let path = module.py().import("sys")?.getattr("path")?;
        // Entries that are no text are not paths; empty ones mean the current folder.
        let entries = path.try_iter()?.filter_map(|entry| entry.ok()?.extract::<String>().ok());
        devcomm_locate::run_by_python(entries.filter(|entry| !entry.is_empty()).map(Into::into));
        Ok(())
    }

    /// How this package has devcomm's own kernels for GPUs, if it has them.
    #[pyfunction]
    fn _kernels() -> Option<&'static str> {
        if cfg!(feature = "kernels-bin") {
            Some("compiled")
        } else {
            cfg!(feature = "ptx").then_some("PTX")
        }
    }

    #[pymodule_export]
    use crate::collectives::PyCollectives;
    #[pymodule_export]
    use crate::communicator::{PyCommunicator, PyDevComm};
    #[pymodule_export]
    use crate::debug::watch;
    #[pymodule_export]
    use crate::expert_parallel::PyExpertParallel;
    #[pymodule_export]
    use crate::fused::{PyAllGatherGemm, PyGemmAllReduce, PyGemmReduceScatter};
    #[pymodule_export]
    use crate::gemm::PyGemm;
    #[pymodule_export]
    use crate::grouped::PyGroupedGemm;
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
