//! Reduces NCCL's library to the GPU code of one architecture.
//!
//! The wheel's library has code for seven architectures, and relocatable code for the device
//! linker. All code but that of one architecture is zeroed, so that the copy compresses to a tenth;
//! layout and symbols are unchanged.

use anyhow::{Context, Result, ensure};

/// Magic number of a fat binary; a section has several in a row.
const FATBIN_MAGIC: u32 = 0xBA55_ED50;

/// Parses `sm_90`, `90` or `sm_90a` as 90.
pub fn parse_arch(text: &str) -> Result<u32, String> {
    let number = text.strip_prefix("sm_").unwrap_or(text).trim_end_matches(char::is_alphabetic);
    number.parse().map_err(|_| format!("{text:?} is not an architecture such as sm_90"))
}

/// Zeroes all GPU code in an ELF `image` except that of `arch`; returns the remaining bytes of GPU
/// code.
pub fn slim(image: &mut [u8], arch: u32) -> Result<u64> {
    ensure!(image.starts_with(b"\x7fELF\x02\x01"), "it is not a 64-bit little-endian ELF file");
    let mut kept = 0;
    for (name, start, end) in sections(image)? {
        match name.as_str() {
            "__nv_relfatbin" => image[start..end].fill(0),
            ".nv_fatbin" => kept += keep_one_arch(&mut image[start..end], arch)?,
            _ => {}
        }
    }
    ensure!(kept > 0, "it has no GPU code for sm_{arch}");
    Ok(kept)
}

/// Returns the name, start and end of each section with bytes in the file.
fn sections(image: &[u8]) -> Result<Vec<(String, usize, usize)>> {
    /// A section of this type has a size but no bytes in the file.
    const NOBITS: u64 = 8;
    // These offsets are those of ELF's 64-bit file header, and below of a section's header.
    let table = number(image, 0x28, 8)?;
    let entry_size = number(image, 0x3A, 2)?;
    let count = number(image, 0x3C, 2)?;
    let names_index = number(image, 0x3E, 2)?;
    let table_end = table.saturating_add(count * entry_size);
    ensure!(table_end <= image.len() as u64, "the section table lies outside of the file");
    let header = |index: u64| -> Result<usize> {
        Ok(usize::try_from(table.saturating_add(index * entry_size))?)
    };
    let names = usize::try_from(field(image, header(names_index)?, 0x18, 8)?)?;
    let mut all = Vec::new();
    for index in 0..count {
        let at = header(index)?;
        if field(image, at, 4, 4)? == NOBITS {
            continue;
        }
        let name = names.saturating_add(usize::try_from(number(image, at, 4)?)?);
        let name = image.get(name..).context("a section's name lies outside of the file")?;
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let start = usize::try_from(field(image, at, 0x18, 8)?)?;
        let end = start.saturating_add(usize::try_from(field(image, at, 0x20, 8)?)?);
        ensure!(end <= image.len(), "a section lies outside of the file");
        all.push((String::from_utf8_lossy(name).into_owned(), start, end));
    }
    Ok(all)
}

/// Zeroes the other architectures' entries in a section of fat binaries; returns the bytes kept.
fn keep_one_arch(section: &mut [u8], arch: u32) -> Result<u64> {
    let mut kept = 0;
    let mut position = 0;
    while position + 16 <= section.len() {
        if number(section, position, 4)? != u64::from(FATBIN_MAGIC) {
            // Between binaries there may be padding, up to a multiple of 8 bytes.
            position += 8;
            continue;
        }
        // The binary's header: magic, version (2 bytes), header size (2), size of the rest (8).
        let header = usize::try_from(number(section, position + 6, 2)?)?;
        let body = usize::try_from(number(section, position + 8, 8)?)?;
        let mut entry = position + header;
        let end = entry.saturating_add(body);
        ensure!(header > 0 && end <= section.len(), "a fat binary extends past its section");
        while entry < end {
            // An entry's header: kind and version (2 bytes each), header size (4), payload size
            // (8), ..., architecture.
            let entry_header = usize::try_from(number(section, entry + 4, 4)?)?;
            let payload = usize::try_from(number(section, entry + 8, 8)?)?;
            let start = entry + entry_header;
            ensure!(
                entry_header > 0 && start.saturating_add(payload) <= end,
                "an entry extends past its fat binary"
            );
            if number(section, entry + 28, 4)? == u64::from(arch) {
                kept += payload as u64;
            } else {
                section[start..start + payload].fill(0);
            }
            entry = start + payload;
        }
        position = end;
    }
    Ok(kept)
}

/// Returns the number at `offset` in the structure at `base`.
fn field(bytes: &[u8], base: usize, offset: usize, width: usize) -> Result<u64> {
    number(bytes, base.saturating_add(offset), width)
}

/// Returns a little-endian number of `width` bytes.
fn number(bytes: &[u8], at: usize, width: usize) -> Result<u64> {
    let field = bytes.get(at..at.saturating_add(width));
    let field = field.context("a field lies outside of the file")?;
    Ok(field.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(arch: u32, payload: &[u8]) -> Vec<u8> {
        let mut entry = vec![0; 64];
        entry[4..8].copy_from_slice(&64u32.to_le_bytes());
        entry[8..16].copy_from_slice(&(payload.len() as u64).to_le_bytes());
        entry[28..32].copy_from_slice(&arch.to_le_bytes());
        entry.extend(payload);
        entry
    }

    fn fatbin(entries: &[Vec<u8>]) -> Vec<u8> {
        let body = entries.concat();
        let mut binary = FATBIN_MAGIC.to_le_bytes().to_vec();
        binary.extend([1, 0, 16, 0]);
        binary.extend((body.len() as u64).to_le_bytes());
        binary.extend(body);
        binary
    }

    /// Returns an ELF file with the given sections.
    fn elf(sections: &[(&str, &[u8])]) -> Vec<u8> {
        let mut image = vec![0; 64];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let mut names = vec![0];
        let mut headers = vec![[0; 64]];
        let mut add = |image: &mut Vec<u8>, names: &mut Vec<u8>, name: &str, bytes: &[u8]| {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&(names.len() as u32).to_le_bytes());
            header[4..8].copy_from_slice(&1u32.to_le_bytes());
            names.extend(name.as_bytes());
            names.push(0);
            let bytes = if name == ".shstrtab" { names.clone() } else { bytes.to_vec() };
            header[0x18..0x20].copy_from_slice(&(image.len() as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
            image.extend(bytes);
            headers.push(header);
        };
        sections.iter().for_each(|(name, bytes)| add(&mut image, &mut names, name, bytes));
        add(&mut image, &mut names, ".shstrtab", &[]);
        let table = image.len() as u64;
        image[0x28..0x30].copy_from_slice(&table.to_le_bytes());
        image[0x3A..0x3C].copy_from_slice(&64u16.to_le_bytes());
        image[0x3C..0x3E].copy_from_slice(&(headers.len() as u16).to_le_bytes());
        image[0x3E..0x40].copy_from_slice(&(headers.len() as u16 - 1).to_le_bytes());
        image.extend(headers.concat());
        image
    }

    #[test]
    fn only_the_wanted_architecture_keeps_its_code() {
        let code = |arch| entry(arch, &[arch as u8; 24]);
        let padded =
            [fatbin(&[code(80), code(90)]), vec![0; 8], fatbin(&[code(90), code(100)])].concat();
        let sections: [(&str, &[u8]); 3] =
            [(".text", &[7; 32]), ("__nv_relfatbin", &[9; 40]), (".nv_fatbin", &padded)];
        let before = elf(&sections);
        let mut after = before.clone();
        assert_eq!(slim(&mut after, 90).unwrap(), 48);
        let bytes = |image: &[u8], value: u8| {
            image.windows(24).filter(|window| window.iter().all(|byte| *byte == value)).count()
        };
        assert_eq!((bytes(&before, 80), bytes(&before, 90), bytes(&before, 100)), (1, 2, 1));
        assert_eq!((bytes(&after, 80), bytes(&after, 90), bytes(&after, 100)), (0, 2, 0));
        assert_eq!((bytes(&before, 9) > 0, bytes(&after, 9)), (true, 0));
        assert_eq!(bytes(&after, 7), bytes(&before, 7));
        assert_eq!(after.len(), before.len());
    }

    #[test]
    fn an_architecture_that_is_not_there_is_refused() {
        let mut image = elf(&[(".nv_fatbin", &fatbin(&[entry(90, &[1; 8])]))]);
        assert!(slim(&mut image, 75).unwrap_err().to_string().contains("no GPU code for sm_75"));
    }

    #[test]
    fn a_damaged_file_is_an_error_not_a_panic() {
        let whole = elf(&[(".nv_fatbin", &fatbin(&[entry(80, &[1; 64]), entry(90, &[1; 64])]))]);
        for length in 0..whole.len() {
            slim(&mut whole[..length].to_vec(), 90).unwrap_err();
        }
        // The length of the fat binary, and the offset of the section table.
        for offset in [64 + 8, 0x28] {
            let mut damaged = whole.clone();
            damaged[offset..offset + 8].copy_from_slice(&u64::MAX.to_le_bytes());
            slim(&mut damaged, 90).unwrap_err();
        }
    }

    #[test]
    fn an_architecture_has_three_spellings() {
        assert_eq!(parse_arch("sm_90"), Ok(90));
        assert_eq!(parse_arch("sm_90a"), Ok(90));
        assert_eq!(parse_arch("100"), Ok(100));
        assert!(parse_arch("hopper").is_err());
    }
}
