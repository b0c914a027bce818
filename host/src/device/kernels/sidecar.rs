//! The sidecar of a kernel module: a JSON file that the kernel build writes beside the PTX.

use devcomm_locate::NcclVersion;
use serde::Deserialize;

use crate::error::{Error, LaunchError, LaunchRefusal, Result};

/// The description of one kernel module. Unknown fields are ignored.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Sidecar {
    /// The Cargo package of the kernels; none for a kernel in another language.
    #[serde(default)]
    pub package: Option<String>,
    pub arch: String,
    pub ptx_isa: String,
    pub nccl: Option<NcclStamp>,
    /// SHA-256 of the cubin in the program, in hexadecimal.
    #[serde(default)]
    pub cubin_sha256: Option<String>,
    pub kernels: Vec<KernelInfo>,
}

/// The NCCL whose device code is linked into the module.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct NcclStamp {
    pub version: String,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct KernelInfo {
    pub name: String,
    pub params: Vec<ParamInfo>,
    /// Whether it opens sessions on LSA barriers.
    #[serde(default)]
    pub lsa_barriers: bool,
}

/// A parameter of a compiled kernel.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct ParamInfo {
    /// The name in the source.
    pub name: String,
    /// The type in the source, such as `Window<f32>`.
    #[serde(rename = "type")]
    pub type_name: String,
    /// The size in bytes.
    pub size: usize,
}

impl Sidecar {
    pub(crate) fn parse(file: &str, json: &str) -> Result<Self> {
        serde_json::from_str(json).map_err(|error| {
            Error::Launch(LaunchError::BadSidecar { file: file.to_owned(), why: error.to_string() })
        })
    }

    /// Returns the version of NCCL's device code in the module, if there is any.
    pub(crate) fn stamp(&self, file: &str) -> Result<Option<NcclVersion>> {
        let Some(stamp) = &self.nccl else { return Ok(None) };
        let numbers: Option<Vec<u32>> =
            stamp.version.split('.').map(|part| part.parse().ok()).collect();
        match numbers.as_deref() {
            Some(&[major, minor, patch]) => Ok(Some(NcclVersion { major, minor, patch })),
            _ => {
                let why = format!("{:?} is not a version of NCCL", stamp.version);
                Err(LaunchError::BadSidecar { file: file.to_owned(), why }.into())
            }
        }
    }

    /// Returns whether the architecture has a suffix: `sm_90a` runs on no other, `sm_100f` on its
    /// family.
    pub(crate) fn is_arch_specific(&self) -> bool {
        self.arch.ends_with(|last: char| last.is_ascii_alphabetic())
    }

    /// Returns the module's compute capability and suffix; `None` for an unknown name.
    fn compute_capability(&self) -> Option<((u32, u32), &str)> {
        let digits = self.arch.strip_prefix("sm_").unwrap_or(&self.arch);
        let number = digits.trim_end_matches(|suffix: char| suffix.is_ascii_alphabetic());
        let code = number.parse::<u32>().ok()?;
        Some(((code / 10, code % 10), &digits[number.len()..]))
    }

    /// Returns whether code for this module's architecture runs on a GPU of that compute
    /// capability.
    pub(crate) fn runs_on(&self, device: (u32, u32)) -> bool {
        match self.compute_capability() {
            // The driver accepts or refuses it.
            None => true,
            Some((arch, "")) => device >= arch,
            // sm_90a: this architecture and no other.
            Some((arch, "a")) => device == arch,
            // sm_100f: its family.
            Some((arch, _)) => device.0 == arch.0 && device >= arch,
        }
    }

    /// Returns whether machine code for this architecture runs on such a GPU: within a major
    /// version only, unlike PTX.
    pub(crate) fn cubin_runs_on(&self, device: (u32, u32)) -> bool {
        let same_major = |(arch, _): ((u32, u32), &str)| arch.0 == device.0;
        self.runs_on(device) && self.compute_capability().is_some_and(same_major)
    }
}

/// Compares the sizes in bytes of the parameters that a launch passes with those of the compiled
/// kernel: the driver copies the number of bytes that the compiled kernel declares.
pub(crate) fn check_params(compiled: &[ParamInfo], sizes: &[usize]) -> Result<(), LaunchRefusal> {
    let describe = || {
        let list: Vec<_> = compiled
            .iter()
            .map(|param| format!("{}: {} ({} B)", param.name, param.type_name, param.size))
            .collect();
        format!("{} parameters ({})", compiled.len(), list.join(", "))
    };
    let refuse = |passed| Err(LaunchRefusal::Parameters { compiled: describe(), passed });
    if compiled.len() != sizes.len() {
        return refuse(sizes.len().to_string());
    }
    match compiled.iter().zip(sizes).enumerate().find(|(_, (param, size))| param.size != **size) {
        None => Ok(()),
        Some((index, (param, size))) => {
            refuse(format!("{size} B for parameter {index} (`{}`)", param.name))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = r#"{"arch":"sm_90","ptx_isa":"8.6","rustc":"rustc 1.95.0","llvm":"22.1.2",
        "nccl":{"version":"2.32.3","bitcode_sha256":"00"},
        "kernels":[{"name":"lsa_allreduce_f32","file":"lsa_allreduce",
            "params":[{"name":"comm","type":"DevComm","size":248,"align":8},
                      {"name":"count","type":"usize","size":8,"align":8}],
            "resources":{"registers":32,"stack":0,"spill_stores":0,"spill_loads":0,
                "static_shared":0}}]}"#;

    #[test]
    fn what_the_build_writes_is_read() {
        let sidecar = Sidecar::parse("lsa_allreduce", EXAMPLE).unwrap();
        assert_eq!((sidecar.arch.as_str(), sidecar.ptx_isa.as_str()), ("sm_90", "8.6"));
        let stamp = sidecar.stamp("lsa_allreduce").unwrap().unwrap();
        assert_eq!(stamp, NcclVersion { major: 2, minor: 32, patch: 3 });
        let kernel = &sidecar.kernels[0];
        assert_eq!(kernel.name, "lsa_allreduce_f32");
        assert_eq!((kernel.params[0].type_name.as_str(), kernel.params[0].size), ("DevComm", 248));
    }

    #[test]
    fn a_module_without_nccl_has_no_stamp() {
        let json = r#"{"arch":"sm_90","ptx_isa":"8.6","nccl":null,"kernels":[]}"#;
        assert_eq!(Sidecar::parse("plain", json).unwrap().stamp("plain").unwrap(), None);
    }

    #[test]
    fn a_broken_description_names_its_module() {
        for json in ["", "{", r#"{"arch":"sm_90"}"#, "[1]"] {
            let error = Sidecar::parse("lsa", json).unwrap_err().to_string();
            assert!(error.contains("kernel module lsa is invalid"), "{error}");
        }
        let json = EXAMPLE.replace("2.32.3", "two");
        assert!(Sidecar::parse("lsa", &json).unwrap().stamp("lsa").is_err());
    }

    #[test]
    fn code_runs_on_its_architecture_and_later_unless_it_is_bound_to_one() {
        let runs = |arch: &str, device| {
            let sidecar = EXAMPLE.replace("sm_90", arch);
            Sidecar::parse("x", &sidecar).unwrap().runs_on(device)
        };
        assert!(runs("sm_90", (9, 0)) && runs("sm_90", (10, 0)) && !runs("sm_90", (8, 9)));
        assert!(runs("sm_90a", (9, 0)) && !runs("sm_90a", (10, 0)));
        assert!(runs("sm_100f", (10, 3)) && !runs("sm_100f", (12, 0)));
        assert!(runs("sm_next", (9, 0)));
    }

    #[test]
    fn a_cubin_runs_on_later_gpus_of_its_major_version_only() {
        let runs = |arch: &str, device| {
            let sidecar = EXAMPLE.replace("sm_90", arch);
            Sidecar::parse("x", &sidecar).unwrap().cubin_runs_on(device)
        };
        assert!(runs("sm_80", (8, 0)) && runs("sm_80", (8, 9)) && !runs("sm_86", (8, 0)));
        assert!(!runs("sm_80", (9, 0)) && !runs("sm_90", (10, 0)) && !runs("sm_100", (9, 0)));
        assert!(runs("sm_90a", (9, 0)) && !runs("sm_100a", (10, 3)) && runs("sm_100f", (10, 3)));
        assert!(!runs("sm_next", (9, 0)));
    }

    #[test]
    fn a_module_is_bound_when_its_architecture_has_a_suffix() {
        let sidecar = |arch: &str| Sidecar::parse("x", &EXAMPLE.replace("sm_90", arch)).unwrap();
        let specific = |arch: &str| sidecar(arch).is_arch_specific();
        assert!(specific("sm_90a") && specific("sm_100f"));
        assert!(!specific("sm_90") && !specific("sm_120"));
    }

    #[test]
    fn parameters_of_another_number_or_size_are_refused() {
        let param = |size| ParamInfo { name: "p".into(), type_name: "T".into(), size };
        let check = |compiled: &[usize]| {
            let params: Vec<ParamInfo> = compiled.iter().map(|&size| param(size)).collect();
            check_params(&params, &[8, 4, 4])
        };
        assert_eq!(check(&[8, 4, 4]), Ok(()));
        for other in [&[8, 4][..], &[8, 4, 4, 4], &[248, 4, 4], &[4, 4, 4], &[8, 4, 2]] {
            assert!(check(other).is_err(), "{other:?}");
        }
        let error = check(&[8, 8, 4]).unwrap_err().to_string();
        assert!(error.contains("4 B for parameter 1 (`p`)"), "{error}");
        assert!(error.contains("p: T (8 B), p: T (8 B), p: T (4 B)"), "{error}");
    }
}
