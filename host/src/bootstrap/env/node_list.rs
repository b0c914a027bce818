//! Slurm's short form of a list of hosts: `n[01-03,7],gpu5` is n01, n02, n03, n7, gpu5.
//!
//! Brackets hold numbers and ranges of numbers, padded as the first number is; a name may have several, of which the last
//! runs fastest. The text may come from anywhere: what it expands to is limited before anything is built.

/// As many hosts as Slurm itself handles in one list.
const MOST_HOSTS: usize = 1 << 16;
/// The longest name of the domain name system.
const LONGEST_NAME: usize = 253;

/// All hosts of a list, in its order; at least one.
pub(super) fn expand(list: &str) -> Result<Vec<String>, String> {
    let mut hosts = Vec::new();
    for name in split(list)? {
        let pattern = Pattern::parse(name.trim())?;
        if pattern.len().is_none_or(|more| more > MOST_HOSTS - hosts.len()) {
            return Err(format!("more than {MOST_HOSTS} hosts"));
        }
        pattern.append_to(&mut hosts)?;
    }
    Ok(hosts)
}

/// Cuts at the commas that are not in brackets.
fn split(list: &str) -> Result<Vec<&str>, String> {
    let (mut names, mut start, mut inside) = (Vec::new(), 0, false);
    for (index, character) in list.char_indices() {
        match (character, inside) {
            ('[', false) => inside = true,
            (']', true) => inside = false,
            ('[', true) => return Err("brackets within brackets".to_owned()),
            (']', false) => return Err("a closing bracket without an opening one".to_owned()),
            (',', false) => {
                names.push(&list[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("an opening bracket without a closing one".to_owned());
    }
    names.push(&list[start..]);
    Ok(names)
}

/// One name with its brackets.
struct Pattern<'a>(Vec<Piece<'a>>);

enum Piece<'a> {
    Text(&'a str),
    /// The ranges of one pair of brackets.
    Numbers(Vec<Range>),
}

struct Range {
    first: u64,
    last: u64,
    /// Digits at least, with zeros before.
    width: usize,
}

impl<'a> Pattern<'a> {
    fn parse(name: &'a str) -> Result<Self, String> {
        let (mut pieces, mut rest) = (Vec::new(), name);
        while let Some((before, after)) = rest.split_once('[') {
            let (inside, after) = after.split_once(']').ok_or("a bracket is not closed")?;
            pieces.push(Piece::Text(plain(before)?));
            pieces.push(Piece::Numbers(
                inside.split(',').map(Range::parse).collect::<Result<_, _>>()?,
            ));
            rest = after;
        }
        pieces.push(Piece::Text(plain(rest)?));
        if name.is_empty() {
            return Err("an empty name".to_owned());
        }
        Ok(Self(pieces))
    }

    /// Number of hosts, unless it is beyond counting.
    fn len(&self) -> Option<usize> {
        self.0.iter().try_fold(1_usize, |product, piece| match piece {
            Piece::Text(_) => Some(product),
            Piece::Numbers(ranges) => product.checked_mul(
                ranges.iter().try_fold(0_usize, |sum, range| sum.checked_add(range.len()?))?,
            ),
        })
    }

    fn append_to(&self, hosts: &mut Vec<String>) -> Result<(), String> {
        let mut names = vec![String::new()];
        for piece in &self.0 {
            match piece {
                Piece::Text(text) => names.iter_mut().for_each(|name| name.push_str(text)),
                Piece::Numbers(ranges) => {
                    let all = |name: String| {
                        let each = ranges.iter().flat_map(|range| {
                            (range.first..=range.last).map(|number| (number, range.width))
                        });
                        each.map(move |(number, width)| format!("{name}{number:0width$}"))
                    };
                    names = names.into_iter().flat_map(all).collect();
                }
            }
            // Looked at after each piece, so that no name of many brackets grows first.
            if names.iter().any(|name| name.len() > LONGEST_NAME) {
                return Err(format!("a name longer than {LONGEST_NAME} characters"));
            }
        }
        hosts.extend(names);
        Ok(())
    }
}

impl Range {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{}` is not a range", text.chars().take(40).collect::<String>());
        let number = |digits: &str| {
            let numeric = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            // `parse` refuses what does not fit.
            digits.parse::<u64>().ok().filter(|_| numeric && digits.len() <= LONGEST_NAME)
        };
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        let (first, last) = number(low).zip(number(high)).ok_or_else(wrong)?;
        if first > last { Err(wrong()) } else { Ok(Self { first, last, width: low.len() }) }
    }

    fn len(&self) -> Option<usize> {
        usize::try_from(self.last - self.first).ok()?.checked_add(1)
    }
}

/// A part of a name outside of brackets.
fn plain(text: &str) -> Result<&str, String> {
    match text.chars().find(|c| !(c.is_ascii_alphanumeric() || "-_.".contains(*c))) {
        None => Ok(text),
        Some(character) => Err(format!("{character:?} in a name")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hosts(list: &str) -> String {
        expand(list).unwrap().join(" ")
    }

    #[test]
    fn a_list_expands_to_its_hosts_in_order() {
        for (list, expanded) in [
            ("gpu5", "gpu5"),
            ("n[01-03,7],gpu5", "n01 n02 n03 n7 gpu5"),
            ("n[5]", "n5"),
            ("n[8-11]", "n8 n9 n10 n11"),
            ("n[08-11]-ib.cluster", "n08-ib.cluster n09-ib.cluster n10-ib.cluster n11-ib.cluster"),
            ("n[098-101]", "n098 n099 n100 n101"),
            ("rack[1-2]node[07-08]", "rack1node07 rack1node08 rack2node07 rack2node08"),
            ("a[1,3-4,9]b,c,d[2-2]", "a1b a3b a4b a9b c d2"),
            ("[1-2]", "1 2"),
            ("b,a,b", "b a b"),
            ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
        ] {
            assert_eq!(hosts(list), expanded, "{list}");
        }
        assert_eq!(expand("n[0-65535]").unwrap().len(), MOST_HOSTS);
    }

    #[test]
    fn what_is_no_list_is_refused_and_says_why() {
        for (list, why) in [
            ("", "an empty name"),
            ("a,,b", "an empty name"),
            ("a,", "an empty name"),
            ("n[1-", "without a closing"),
            ("n1]", "without an opening"),
            ("n[[1-2]]", "brackets within"),
            ("n[1-2[3]]", "brackets within"),
            ("n[3-1]", "`3-1` is not a range"),
            ("n[]", "`` is not a range"),
            ("n[1,]", "`` is not a range"),
            ("n[a-b]", "`a-b` is not a range"),
            ("n[-1]", "`-1` is not a range"),
            ("n[1--2]", "`1--2` is not a range"),
            ("n[+1-2]", "`+1-2` is not a range"),
            ("n[1-99999999999999999999999]", "is not a range"),
            ("n[1-99999999999]", "more than 65536 hosts"),
            ("n[0-18446744073709551615]", "more than 65536 hosts"),
            ("n[0-65535],m", "more than 65536 hosts"),
            ("n[0-999][0-999][0-999][0-999][0-999][0-999][0-999]", "more than 65536 hosts"),
            ("n 1", "' ' in a name"),
            ("n/../1", "'/' in a name"),
            ("n\0", "'\\0' in a name"),
            ("größe", "'ö' in a name"),
        ] {
            let error = expand(list).unwrap_err();
            assert!(error.contains(why), "{list:?}: {error}");
        }
        assert!(expand(&"x".repeat(254)).unwrap_err().contains("longer than 253"));
        assert!(expand(&"n[1]".repeat(5000)).unwrap_err().contains("longer than 253"));
        assert!(expand(&format!("n[{}1]", "0".repeat(100_000))).is_err());
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic_or_grow_without_bounds(list in r"[a-c0-9\[\],. -]{0,60}") {
            if let Ok(hosts) = expand(&list) {
                prop_assert!((1..=MOST_HOSTS).contains(&hosts.len()));
                prop_assert!(hosts.iter().all(|host| (1..=LONGEST_NAME).contains(&host.len())));
            }
        }

        #[test]
        fn any_text_at_all_is_a_list_or_an_error(list in any::<String>()) {
            let _ = expand(&list);
        }

        #[test]
        fn a_list_written_from_hosts_gives_them_back(
            parts in prop::collection::vec(("[a-z]{1,8}", 0_u64..5000, 0_u64..50, 1_usize..6), 1..8),
        ) {
            let (mut list, mut expected) = (Vec::new(), Vec::new());
            for (name, first, more, width) in parts {
                list.push(format!("{name}[{first:0width$}-{:0width$}]", first + more));
                expected.extend((first..=first + more).map(|number| format!("{name}{number:0width$}")));
            }
            prop_assert_eq!(expand(&list.join(",")).unwrap(), expected);
        }
    }
}
