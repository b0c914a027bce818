//! `cargo xtask raw`: generates the list of NCCL's C functions for kernels from NCCL itself.
//!
//! Names and LLVM types come from `libnccl_device.bc`, names and C types of parameters from NCCL's
//! headers. The two must agree with each other and with the sizes of the project's own structs. The
//! output is checked in, in `crates/nccl_device/src/raw`: `functions.rs`, the list, and
//! `native.md`, the functions that are not on it and why.

mod compare;
mod headers;
mod list;
mod native;
mod types;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cuda_builder::{Signature, device_functions};
use devcomm_locate::{NcclPart, NcclTree, NcclVersion, find_nccl};

pub use compare::differences;
pub use list::{Function, Param, parse};

/// Prefix of NCCL's C functions; the bitcode's other functions have C++ names.
const C_PREFIX: &str = "nccl";

/// The folder of the checked-in files.
const FOLDER: &str = "crates/nccl_device/src/raw";
const LIST: &str = "functions.rs";
const NATIVE: &str = "native.md";

/// The NCCL installation that kernel builds use, with bitcode and headers.
#[derive(Debug)]
pub struct Nccl {
    /// The version.
    pub version: NcclVersion,
    bitcode: PathBuf,
    include: PathBuf,
}

impl Nccl {
    /// Finds it as kernel builds do.
    ///
    /// # Errors
    ///
    /// If a component is missing, with the searched paths.
    pub fn find() -> Result<Self> {
        let complete = |tree: &NcclTree| match (tree.version, &tree.include) {
            (Some(_), Some(_)) => Ok(()),
            _ => Err("it has no headers with a version".to_owned()),
        };
        let tree = find_nccl(None, NcclPart::Bitcode, complete)?;
        match (tree.version, tree.bitcode, tree.include) {
            (Some(version), Some(bitcode), Some(include)) => Ok(Self { version, bitcode, include }),
            _ => bail!("the NCCL in {} is incomplete", tree.root.display()),
        }
    }

    /// Returns the C functions of the bitcode.
    ///
    /// # Errors
    ///
    /// If LLVM cannot read it.
    pub fn c_functions(&self) -> Result<Vec<Signature>> {
        let mut functions = device_functions(&self.bitcode)?;
        functions.retain(|function| function.name.starts_with(C_PREFIX));
        Ok(functions)
    }
}

/// The two checked-in files.
#[derive(Debug, PartialEq, Eq)]
pub struct Files {
    /// `functions.rs`: the list.
    pub list: String,
    /// `native.md`: NCCL's functions that the list leaves out, with the reason of each.
    pub native: String,
}

impl Files {
    /// Generates them from NCCL.
    ///
    /// # Errors
    ///
    /// All disagreements of bitcode, headers and the project's structs.
    pub fn generate(nccl: &Nccl) -> Result<Self> {
        let signatures = nccl.c_functions()?;
        let prototypes = headers::read(&nccl.include)?;
        let (mut functions, mut structs) = (Vec::new(), Vec::new());
        // The list is in the headers' order.
        for prototype in &prototypes {
            let Some(signature) = signatures.iter().find(|s| s.name == prototype.name) else {
                // These are host functions, or functions without a body.
                continue;
            };
            if types::is_struct(&signature.returns) {
                structs.push((prototype.name.as_str(), signature.returns.as_str()));
            } else {
                functions.push(Function::of_prototype(prototype)?);
            }
        }
        let declared = |s: &&Signature| !prototypes.iter().any(|p| p.name == s.name);
        let undeclared: Vec<&str> =
            signatures.iter().filter(declared).map(|s| s.name.as_str()).collect();
        if !undeclared.is_empty() {
            bail!("no header declares {}", undeclared.join(", "));
        }
        let listed = |s: &&Signature| !types::is_struct(&s.returns);
        let expected: Vec<Signature> = signatures.iter().filter(listed).cloned().collect();
        let faults = differences(&functions, &expected);
        if !faults.is_empty() {
            bail!("headers, bitcode and structs disagree:\n  {}", faults.join("\n  "));
        }
        Ok(Self {
            list: list::write(&functions, nccl.version),
            native: native::write(&structs, nccl.version)?,
        })
    }

    /// Reads the checked-in files.
    ///
    /// # Errors
    ///
    /// If a file cannot be read.
    pub fn checked_in(root: &Path) -> Result<Self> {
        let read = |name| {
            let path = root.join(FOLDER).join(name);
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        Ok(Self { list: read(LIST)?, native: read(NATIVE)? })
    }

    fn write(&self, root: &Path) -> Result<()> {
        let folder = root.join(FOLDER);
        fs::create_dir_all(&folder)?;
        for (name, text) in [(LIST, &self.list), (NATIVE, &self.native)] {
            let path = folder.join(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }
}

/// Writes the files, or compares the checked-in ones. The exit code is 1 if those are outdated.
///
/// # Errors
///
/// If a component is missing, or NCCL's bitcode and headers disagree.
pub fn raw(root: &Path, check: bool) -> Result<u8> {
    let nccl = Nccl::find()?;
    let files = Files::generate(&nccl)?;
    let count = parse(&files.list)?.len();
    if !check {
        files.write(root)?;
        println!("wrote {FOLDER}/{{{LIST}, {NATIVE}}}: {count} functions of NCCL {}", nccl.version);
        return Ok(0);
    }
    let old = Files::checked_in(root)?;
    let equal = [(LIST, old.list == files.list), (NATIVE, old.native == files.native)];
    for (name, _) in equal.iter().filter(|(_, equal)| !equal) {
        eprintln!("{FOLDER}/{name} does not match NCCL {}: run `cargo xtask raw`", nccl.version);
    }
    for difference in differences(&parse(&old.list)?, &listed(nccl.c_functions()?)) {
        eprintln!("  {difference}");
    }
    if old == files {
        println!("{count} functions match NCCL {}", nccl.version);
    }
    Ok(u8::from(old != files))
}

/// Returns the functions on the list: those that return no struct.
pub fn listed(mut functions: Vec<Signature>) -> Vec<Signature> {
    functions.retain(|function| !types::is_struct(&function.returns));
    functions
}

/// Returns the functions not on the list: those that return a struct.
pub fn not_listed(mut functions: Vec<Signature>) -> Vec<Signature> {
    functions.retain(|function| types::is_struct(&function.returns));
    functions
}
