//! Splits the crates' bitcode into one small module per kernel file.
//!
//! A linker takes a `linkonce` definition only if it is used. So every definition but the file's
//! kernels becomes `linkonce`, the crates are read lazily, and unused code (most of `core`) is
//! never parsed. A file's module has only its kernels' code and what that calls: if the
//! module's hash is unchanged, its PTX is reused.

use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::llvm::{Context, Linkage, Llvm, Module, Result};
use crate::metadata::{self, Declared};
use crate::names::{DRIVER_FUNCTIONS, DYNAMIC_SHARED};

/// A request to split.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Split {
    /// The kernel package's bitcode.
    pub(crate) kernels: PathBuf,
    /// The bitcode of its dependencies, including `core`.
    pub(crate) libraries: Vec<PathBuf>,
    /// The file name for kernels without metadata.
    pub(crate) default_file: String,
    /// The output folder.
    pub(crate) folder: PathBuf,
}

/// One kernel file of the package.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct KernelFile {
    pub(crate) file: String,
    pub(crate) kernels: Vec<Declared>,
    pub(crate) bitcode: PathBuf,
    /// Undefined functions that are not the driver's: NCCL's.
    pub(crate) wanted: Vec<String>,
}

impl KernelFile {
    /// Returns whether the kernels call NCCL: all of its C functions, and no others, have this
    /// prefix.
    pub(crate) fn uses_nccl(&self) -> bool {
        self.wanted.iter().any(|name| name.starts_with("nccl"))
    }
}

/// Returns the file with this kernel, or else the file with this name.
pub(crate) fn only(
    sources: Vec<KernelFile>,
    name: &str,
) -> std::result::Result<Vec<KernelFile>, Error> {
    let kernels = || sources.iter().flat_map(|source| &source.kernels).map(|kernel| &*kernel.name);
    let is_kernel = kernels().any(|kernel| kernel == name);
    let known = kernels().collect::<Vec<_>>().join(", ");
    let is_wanted = |source: &KernelFile| match is_kernel {
        true => source.kernels.iter().any(|kernel| kernel.name == name),
        false => source.file == name,
    };
    let wanted: Vec<KernelFile> = sources.into_iter().filter(is_wanted).collect();
    match wanted.is_empty() {
        true => Err(Error::NoKernel { kernel: name.to_owned(), known }),
        false => Ok(wanted),
    }
}

/// Splits the package.
pub(crate) fn split(llvm: &Llvm, job: &Split) -> Result<Vec<KernelFile>> {
    let context = Context::new(llvm);
    let whole = join(&context, job)?;
    let files = metadata::kernels(&whole, &job.default_file)?;
    let whole_path = job.folder.join("whole.package.bc");
    whole.write_bitcode(&whole_path)?;
    drop(whole);

    let mut split = Vec::new();
    for (file, kernels) in files {
        let names: HashSet<&str> = kernels.iter().map(|kernel| kernel.name.as_str()).collect();
        let source = context.read_lazily(&whole_path)?;
        make_linkonce(&source, |name| names.contains(name));
        let mut module = context.new_module(&file, &source)?;
        module.set_name(&file);
        module.link_in(source)?;
        let bitcode = job.folder.join(format!("{file}.bc"));
        module.write_bitcode(&bitcode)?;
        let wanted = undefined(&module)
            .into_iter()
            .filter(|name| !DRIVER_FUNCTIONS.contains(&name.as_str()))
            .collect();
        split.push(KernelFile { file, kernels, bitcode, wanted });
    }
    Ok(split)
}

/// Links the kernel package with the definitions that it uses from its dependencies.
fn join<'c>(context: &'c Context<'c>, job: &Split) -> Result<Module<'c>> {
    let mut whole = context.read(&job.kernels)?;
    retire_used_lists(&whole);
    let mut libraries = Vec::new();
    for path in &job.libraries {
        let library = context.read_lazily(path)?;
        let functions = library.functions();
        let defined = functions.iter().filter(|f| !f.is_declaration()).map(|f| f.name());
        let variables = library.globals();
        let variables = variables.iter().filter(|g| !g.is_declaration()).map(|g| g.name());
        libraries.push((path, defined.chain(variables).collect::<HashSet<_>>()));
    }
    // Libraries depend on each other in both directions (`core` calls the panic handler of a crate
    // above it), so one pass is not enough.
    loop {
        let mut linked = false;
        for (path, defined) in &libraries {
            if undefined(&whole).iter().any(|name| defined.contains(name)) {
                let library = context.read_lazily(path)?;
                export_locals(&library, path);
                make_linkonce(&library, |_| false);
                whole.link_in(library)?;
                linked = true;
            }
        }
        if !linked {
            return Ok(whole);
        }
    }
}

/// Makes every definition `linkonce`, except those for which `keep` is true.
pub(crate) fn make_linkonce(module: &Module<'_>, keep: impl Fn(&str) -> bool) {
    retire_used_lists(module);
    let functions = module.functions();
    let functions = functions.into_iter().map(|function| function.global());
    for symbol in functions.chain(module.globals()).chain(module.aliases()) {
        let local = [Linkage::INTERNAL, Linkage::PRIVATE].contains(&symbol.linkage());
        if !symbol.is_declaration() && !local && !keep(&symbol.name()) {
            symbol.set_linkage(Linkage::LINK_ONCE);
        }
    }
}

/// Exports a library's local symbols under unique names. A library that is linked in two rounds
/// would otherwise duplicate its local variables.
fn export_locals(library: &Module<'_>, path: &Path) {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let functions = library.functions();
    let functions = functions.into_iter().map(|function| function.global());
    for (index, symbol) in functions.chain(library.globals()).enumerate() {
        let local = [Linkage::INTERNAL, Linkage::PRIVATE].contains(&symbol.linkage());
        if local && !symbol.is_declaration() {
            symbol.set_name(&format!("{}.{stem}.{index}", symbol.name()));
            symbol.set_linkage(Linkage::LINK_ONCE);
        }
    }
}

/// Retires the lists (`llvm.used`) that keep symbols alive, such as the kernels' metadata.
fn retire_used_lists(module: &Module<'_>) {
    for global in module.globals() {
        if global.linkage() == Linkage::APPENDING && global.name().ends_with(".used") {
            global.retire();
        }
    }
}

/// Returns the module's undefined symbols.
pub(crate) fn undefined(module: &Module<'_>) -> BTreeSet<String> {
    let functions = module.functions();
    let functions = functions.iter().filter(|f| !f.is_intrinsic()).map(|f| f.global());
    functions
        .chain(module.globals())
        .filter(|symbol| symbol.is_declaration() && !symbol.users().is_empty())
        .map(|symbol| symbol.name())
        .filter(|name| name != DYNAMIC_SHARED)
        .collect()
}
