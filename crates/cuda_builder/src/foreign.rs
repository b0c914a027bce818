//! Makes artifacts from PTX modules of other compilers.

use std::fs;
use std::path::Path;

use crate::arch::NvvmArch;
use crate::artifact::{ModuleArtifact, NcclCode, Sidecar, kernels, read_ptx};
use crate::cache::write_if_changed;
use crate::error::Error;
use crate::metadata::Declared;
use crate::ptxas::Ptxas;

impl ModuleArtifact {
    /// Returns an artifact from a PTX module of another compiler, such as `nvcc`: assembles it with
    /// the builder's `ptxas` and flags, and writes cubin and sidecar next to it. Each entry is a
    /// kernel.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], [`Error::Ptx`] if it is not valid PTX, [`Error::Ptxas`] if it does not
    /// assemble.
    pub fn from_ptx(ptx: &Path, compiler: &str, nccl: Option<NcclCode>) -> Result<Self, Error> {
        let file = ptx.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let text = fs::read_to_string(ptx).map_err(Error::io("read", ptx))?;
        let read = read_ptx(&file, &text)?;
        let output = ptx.with_extension("cubin");
        let (cubin, resources) = match Ptxas::find(read.target.parse::<NvvmArch>())? {
            Some(ptxas) => {
                let resources = ptxas.assemble(&file, &read.target, ptx, &output, true)?;
                (Some(output), Some(resources))
            }
            None => (None, None),
        };
        let declared = |name: &String| Declared::unknown(name.clone(), file.clone());
        let declared: Vec<_> = read.entries.iter().map(|entry| declared(&entry.name)).collect();
        let info = Sidecar {
            package: None,
            arch: read.target.clone(),
            ptx_isa: read.version.clone(),
            rustc: compiler.to_owned(),
            llvm: String::new(),
            nccl,
            cubin_sha256: None,
            kernels: kernels(&file, &declared, &read, resources.as_deref(), &[])?,
        };
        let sidecar = ptx.with_extension("json");
        let json = serde_json::to_string_pretty(&info).unwrap_or_default();
        write_if_changed(&sidecar, json.as_bytes())?;
        Ok(Self { file, ptx: ptx.to_owned(), sidecar, cubin, info, linked: true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = "\
.version 8.0
.target sm_90
.address_size 64

.visible .entry sum(
	.param .align 8 .b8 sum_param_0[248],
	.param .u64 sum_param_1
)
{
	ret;
}
";

    #[test]
    fn ptx_of_another_compiler_gets_the_sidecar_of_our_own() {
        let folder = tempfile::tempdir().unwrap();
        let ptx = folder.path().join("sum.ptx");
        fs::write(&ptx, PTX).unwrap();
        let nccl = NcclCode { version: "2.32.3".into(), bitcode_sha256: String::new() };
        let module = ModuleArtifact::from_ptx(&ptx, "nvcc 13.5", Some(nccl)).unwrap();
        let written = fs::read(folder.path().join("sum.json")).unwrap();
        assert_eq!(serde_json::from_slice::<Sidecar>(&written).unwrap(), module.info);
        assert_eq!((module.info.arch.as_str(), module.info.rustc.as_str()), ("sm_90", "nvcc 13.5"));
        let kernel = &module.info.kernels[0];
        let sizes: Vec<usize> = kernel.params.iter().map(|param| param.size).collect();
        assert_eq!((kernel.name.as_str(), sizes), ("sum", vec![248, 8]));
        // Both need a ptxas.
        assert_eq!(module.cubin.is_some(), kernel.resources.is_some());
        assert!(module.cubin.is_none_or(|cubin| cubin.is_file()));
    }

    #[test]
    fn text_that_is_not_ptx_is_refused_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let ptx = folder.path().join("sum.ptx");
        fs::write(&ptx, "hello").unwrap();
        let error = ModuleArtifact::from_ptx(&ptx, "nvcc", None).unwrap_err().to_string();
        assert!(error.contains("sum"), "{error}");
    }
}
