//! Assembles PTX with NVIDIA's `ptxas`, if found, and parses its report on each kernel.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use devcomm_locate::PTXAS_MIN;
use serde::{Deserialize, Serialize};

use crate::arch::NvvmArch;
use crate::error::Error;
use crate::lines::Lines;

/// Resources of a kernel, from `ptxas`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Registers per thread.
    pub registers: u32,
    /// Stack per thread, in bytes.
    pub stack: u32,
    /// Stores of spilled registers, in bytes.
    pub spill_stores: u32,
    /// Loads of spilled registers, in bytes.
    pub spill_loads: u32,
    /// Static shared memory per block, in bytes.
    pub static_shared: u32,
    /// Whether `ptxas` serialises `wgmma` instructions (its warning C7510), which costs a kernel
    /// most of its speed.
    #[serde(default)]
    pub serialized: bool,
}

impl Resources {
    /// Returns the maximum block size that the register file allows, at most 1,024.
    pub fn max_threads(&self) -> u32 {
        // Since Volta a multiprocessor has four register files of 16,384 registers. A warp uses one
        // of them, allocated in units of eight registers per thread.
        const FILES: u32 = 4;
        const FILE: u32 = 16_384;
        const WARP: u32 = 32;
        const LARGEST_BLOCK: u32 = 1024;
        let warp = self.registers.max(1).next_multiple_of(8) * WARP;
        (FILE / warp * FILES * WARP).min(LARGEST_BLOCK)
    }
}

/// An executable `ptxas`.
#[derive(Debug)]
pub(crate) struct Ptxas {
    program: PathBuf,
    /// The version output, for the cache key.
    pub(crate) version: String,
}

impl Ptxas {
    /// Finds an installed `ptxas` that knows these architectures, if any.
    pub(crate) fn find(archs: impl IntoIterator<Item = NvvmArch>) -> Result<Option<Self>, Error> {
        let oldest = archs.into_iter().map(NvvmArch::oldest_ptxas).max().unwrap_or(PTXAS_MIN);
        let Ok(program) = devcomm_locate::find_ptxas_since(oldest) else {
            return Ok(None);
        };
        let output = Command::new(&program).arg("--version").output();
        let output = output.map_err(Error::io("run", &program))?;
        let version = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(Some(Self { program, version }))
    }

    /// Assembles `ptx` into `cubin`; returns the kernels' names and resources.
    pub(crate) fn assemble(
        &self,
        file: &str,
        arch: &str,
        ptx: &Path,
        cubin: &Path,
        line_tables: bool,
    ) -> Result<Vec<(String, Resources)>, Error> {
        let output = Command::new(&self.program)
            .args(line_tables.then_some("--generate-line-info"))
            .args(["-v", "--gpu-name", arch, "--output-file"])
            .args([cubin, ptx])
            .output()
            .map_err(Error::io("run", &self.program))?;
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            let source = fs::read_to_string(ptx).unwrap_or_default();
            return Err(Error::Ptxas {
                file: file.to_owned(),
                reason: reason(&text, &Lines::of(&source)),
                ptx: ptx.to_owned(),
                message: text.trim().to_owned(),
            });
        }
        Ok(read(&text))
    }
}

/// Parses the output of `ptxas -v`.
fn read(text: &str) -> Vec<(String, Resources)> {
    let mut kernels: Vec<(String, Resources)> = Vec::new();
    let mut in_entry = false;
    let mut serialized = BTreeSet::new();
    for line in text.lines() {
        if let Some((_, rest)) = line.split_once("(C7510)") {
            // The last quoted word is the function's name.
            serialized.extend(rest.rsplit('\'').nth(1));
            continue;
        }
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default();
            kernels.push((name.to_owned(), Resources::default()));
            continue;
        }
        let Some((name, resources)) = kernels.last_mut() else {
            continue;
        };
        if let Some((_, function)) = line.split_once("Function properties for ") {
            // `ptxas` also prints the properties of functions that are not inlined.
            in_entry = function.trim() == name;
        } else if line.contains("bytes stack frame") && in_entry {
            resources.stack = number_before(line, " bytes stack frame");
            resources.spill_stores = number_before(line, " bytes spill stores");
            resources.spill_loads = number_before(line, " bytes spill loads");
        } else if line.contains(": Used ") {
            resources.registers = number_before(line, " registers");
            resources.static_shared = number_before(line, " bytes smem");
        }
    }
    for (name, resources) in &mut kernels {
        resources.serialized = serialized.contains(name.as_str());
    }
    kernels
}

/// Returns what `ptxas` says, with the user's lines and what to do; its first error if nothing is
/// known.
fn reason(text: &str, lines: &Lines<'_>) -> String {
    for line in text.lines() {
        if let Some(of_shared) = too_much_shared(line, lines) {
            return of_shared;
        }
        // `ptxas module.ptx, line 24; error   : Unknown modifier '.bar'`
        let Some((before, error)) = line.split_once("; error") else { continue };
        let number = before.rsplit(' ').next().and_then(|number| number.parse::<usize>().ok());
        let place = number.and_then(|number| lines.place(number.checked_sub(1)?));
        let error = error.trim_start_matches([' ', ':']);
        return place.map_or_else(|| error.to_owned(), |place| format!("{place}: {error}"));
    }
    text.lines().find(|line| line.contains("error")).unwrap_or(text.trim()).to_owned()
}

/// Explains `Entry function 'k' uses too much shared data (0x40000 bytes, 0xc000 max)`.
fn too_much_shared(line: &str, lines: &Lines<'_>) -> Option<String> {
    let (entry, numbers) = line.split_once(" uses too much shared data (0x")?;
    let kernel = entry.split('\'').nth(1)?;
    let (bytes, most) = numbers.split_once(" bytes, 0x")?;
    let number = |text: &str| u32::from_str_radix(text.split(' ').next()?, 16).ok();
    let (bytes, most) = (number(bytes)?, number(most)?);
    // The largest static of the module, with the line that first uses it.
    let array = |line: &&str| {
        let declared = line.split_once(".shared ")?.1.split_once('[')?;
        let len = declared.1.split(']').next()?.parse::<u32>().ok()?;
        Some((len, declared.0.rsplit(' ').next()?.to_owned()))
    };
    let largest = lines.lines().iter().filter_map(array).max()?;
    let place = lines.first_use(&largest.1).map_or(String::new(), |at| format!(", used at {at}"));
    Some(format!(
        "`{kernel}` has {bytes} bytes of static shared memory, and a block has at most {most} (the \
         largest array has {}{place}); take `shared::dynamic_shared_mem()` for large arrays, \
         and `.dynamic_shared(bytes)` in the launch: up to 227 KiB on Hopper",
        largest.0
    ))
}

/// Returns the number before the given words; 0 if they are missing.
fn number_before(line: &str, words: &str) -> u32 {
    let number = line.split_once(words).and_then(|(before, _)| before.split_whitespace().last());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{Resources, read};

    #[test]
    fn the_numbers_of_each_kernel_are_read() {
        let text = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes \
                    smem, 408 bytes cmem[0]
ptxas info    : Compile time = 2.1 ms
ptxas info    : Function properties for helper
    64 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized \
                    due to ill formed pipeline stage in the function 'two'
ptxas info    : Compiling entry function 'two' for 'sm_90'
ptxas info    : Function properties for two
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
";
        let one = Resources {
            registers: 32,
            stack: 16,
            spill_stores: 8,
            spill_loads: 4,
            static_shared: 1024,
            serialized: false,
        };
        let two = Resources { registers: 8, serialized: true, ..Resources::default() };
        assert_eq!(read(text), [("one".to_owned(), one), ("two".to_owned(), two)]);
    }

    #[test]
    fn threads_fit_the_register_file() {
        let threads = |registers| Resources { registers, ..Resources::default() }.max_threads();
        assert_eq!((threads(32), threads(64), threads(168), threads(172)), (1024, 1024, 384, 256));
        assert_eq!(threads(255), 256);
    }
}
