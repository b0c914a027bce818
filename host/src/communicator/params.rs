//! NCCL's parameters, with the values that the library uses.

use std::collections::BTreeMap;
use std::ffi::CString;

use super::Library;
use crate::error::Result;

/// A read-only map of the parameters that the library reports, by the names of their environment
/// variables. Each call queries NCCL.
///
/// NCCL 2.32.3 reports only a few that concern its log, such as `NCCL_DEBUG`, and no other `NCCL_*`
/// variables.
///
/// ```no_run
/// # fn main() -> devcomm_host::Result<()> {
/// let library = devcomm_host::Library::open(None)?;
/// for (key, value) in library.params().to_map()? {
///     println!("{key}={value}");
/// }
/// # Ok(())
/// # }
/// ```
///
/// NCCL: `ncclParamGetAllParameterKeys`, `ncclParamGetParameter`, since 2.30.4; the methods fail
/// with [`NcclError::Unsupported`](crate::NcclError::Unsupported) on an older library. NCCL's typed
/// getters are not bound: they fail on nearly every parameter, since these are lists and
/// enumerations.
#[derive(Clone, Debug)]
#[doc(alias = "ncclParamGetParameter")]
#[doc(alias = "ncclParamGetAllParameterKeys")]
pub struct Params {
    library: Library,
}

impl Params {
    /// Returns the value as text, empty if it is not set; `None` for a parameter that NCCL does not
    /// report.
    ///
    /// # Errors
    ///
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported),
    /// [`Error::Nccl`](crate::Error::Nccl).
    pub fn get(&self, key: &str) -> Result<Option<String>> {
        // No key contains a NUL.
        let Ok(key) = CString::new(key) else { return Ok(None) };
        self.library.nccl().parameter(&key)
    }

    /// Returns the names, sorted.
    ///
    /// # Errors
    ///
    /// The errors are those of [`get`](Self::get).
    pub fn keys(&self) -> Result<Vec<String>> {
        let mut keys = self.library.nccl().parameter_keys()?;
        keys.sort_unstable();
        Ok(keys)
    }

    /// Returns every parameter with its value.
    ///
    /// # Errors
    ///
    /// The errors are those of [`get`](Self::get).
    pub fn to_map(&self) -> Result<BTreeMap<String, String>> {
        let values = self.keys()?.into_iter().filter_map(|key| match self.get(&key) {
            Ok(value) => value.map(|value| Ok((key, value))),
            Err(error) => Some(Err(error)),
        });
        values.collect()
    }
}

impl Library {
    /// Returns NCCL's parameters.
    #[must_use]
    pub fn params(&self) -> Params {
        Params { library: self.clone() }
    }

    /// Makes NCCL print its parameters to standard output, each with its purpose, the accepted
    /// values and the source of its value.
    ///
    /// NCCL: `ncclParamDumpAll`.
    ///
    /// # Errors
    ///
    /// [`NcclError::Unsupported`](crate::NcclError::Unsupported) on a library older than 2.30.4.
    #[doc(alias = "ncclParamDumpAll")]
    pub fn dump_params(&self) -> Result<()> {
        self.nccl().dump_parameters()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn real() -> Option<Params> {
        let library = Library::open(None).inspect_err(|error| eprintln!("SKIPPED: {error}"));
        library.ok().map(|library| library.params())
    }

    #[test]
    fn the_real_library_reports_its_log_parameters_and_no_unknown_one() {
        let Some(params) = real() else { return };
        let keys = params.keys().unwrap();
        for key in ["NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_SET_THREAD_NAME"] {
            assert!(keys.iter().any(|known| known == key), "{key}: {keys:?}");
        }
        assert!(keys.is_sorted());
        assert_eq!(params.get("NCCL_NO_SUCH_THING").unwrap(), None);
        assert_eq!(params.get("").unwrap(), None);
        assert_eq!(params.get("NCCL_DEBUG\0").unwrap(), None);
    }

    /// Runs itself in a process of its own, whose standard output it reads.
    #[test]
    fn a_dump_prints_every_parameter_with_its_value() {
        const TEST: &str = "a_dump_prints_every_parameter_with_its_value";
        let Some(params) = real() else { return };
        if std::env::var_os("DEVCOMM_TEST_DUMP").is_some() {
            return params.library.dump_params().unwrap();
        }
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child
            .args([TEST, "--nocapture"])
            .envs([("DEVCOMM_TEST_DUMP", "1"), ("NCCL_DEBUG", "WARN")]);
        let output = child.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8_lossy(&output.stdout);
        for key in params.keys().unwrap() {
            assert!(text.contains(&key), "{key} is not in:\n{text}");
        }
        let line = text.lines().find(|line| line.contains("NCCL_DEBUG=") || line.contains("WARN"));
        assert!(line.is_some(), "the value of NCCL_DEBUG is not in:\n{text}");
    }

    #[test]
    fn the_map_holds_what_single_reads_give_on_any_thread() {
        let Some(params) = real() else { return };
        let map = params.to_map().unwrap();
        assert_eq!(map.keys().cloned().collect::<Vec<_>>(), params.keys().unwrap());
        assert!(!map["NCCL_SET_THREAD_NAME"].is_empty());
        let read = || {
            for (key, value) in &map {
                assert_eq!(params.get(key).unwrap().as_ref(), Some(value), "{key}");
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(read);
            }
        });
    }
}
