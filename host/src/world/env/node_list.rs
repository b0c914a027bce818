//! Slurm's compressed host lists: `n[01-03,7],gpu5` is n01, n02, n03, n7, gpu5.
//!
//! Only the first host is needed, and whether it is the only one. The text is not trusted.

/// The length of the longest DNS name.
const LONGEST_NAME: usize = 253;

/// Returns the first host of a list, and whether it is the only one.
pub(super) fn first(list: &str) -> Result<(String, bool), String> {
    let (mut host, mut rest, mut alone) = (String::new(), list, true);
    while let Some(next) = rest.chars().next() {
        let used = match next {
            ',' => {
                alone = false;
                break;
            }
            '[' => {
                let end = rest.find(']').ok_or("an opening bracket without a closing one")?;
                let (number, is_only) = first_number(&rest[1..end])?;
                host.push_str(number);
                alone &= is_only;
                end + 1
            }
            character if character.is_ascii_alphanumeric() || "-_.".contains(character) => {
                host.push(character);
                1
            }
            other => return Err(format!("{other:?} in a name")),
        };
        rest = &rest[used..];
        if host.len() > LONGEST_NAME {
            return Err(format!("a name longer than {LONGEST_NAME} characters"));
        }
    }
    if host.is_empty() { Err("an empty name".to_owned()) } else { Ok((host, alone)) }
}

/// Returns the first number in the text between two brackets, with its leading zeros, and whether
/// it is the only one.
fn first_number(inside: &str) -> Result<(&str, bool), String> {
    let range = inside.split(',').next().unwrap_or_default();
    let (low, high) = range.split_once('-').unwrap_or((range, range));
    let number = |digits: &str| {
        let numeric = digits.bytes().all(|byte| byte.is_ascii_digit());
        digits.parse::<u64>().ok().filter(|_| numeric)
    };
    match number(low).zip(number(high)) {
        Some((first, last)) if first <= last => {
            Ok((low, range.len() == inside.len() && first == last))
        }
        _ => Err(format!("`{}` is not a range", range.chars().take(40).collect::<String>())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_a_list_is_found_and_whether_it_is_alone() {
        for (list, host, alone) in [
            ("gpu5", "gpu5", true),
            ("n[5]", "n5", true),
            ("n[01-03,7],gpu5", "n01", false),
            ("n[8-11]", "n8", false),
            ("n[3,7]", "n3", false),
            ("n[08-11]-ib.cluster", "n08-ib.cluster", false),
            ("rack[1-2]node[07-08]", "rack1node07", false),
            ("rack[1]node[07]", "rack1node07", true),
            ("d[2-2]", "d2", true),
            ("[1-2]", "1", false),
            ("b,a,b", "b", false),
            ("10.0.0.[1-2]", "10.0.0.1", false),
        ] {
            assert_eq!(first(list), Ok((host.to_owned(), alone)), "{list}");
        }
    }

    #[test]
    fn a_malformed_list_is_refused_with_the_reason() {
        for (list, why) in [
            ("", "an empty name"),
            (",b", "an empty name"),
            ("n[1-", "without a closing"),
            ("n1]", "']' in a name"),
            ("n[[1-2]]", "`[1-2` is not a range"),
            ("n[3-1]", "`3-1` is not a range"),
            ("n[1-99999999999999999999999]", "is not a range"),
            ("n[]", "`` is not a range"),
            ("n[a-b]", "`a-b` is not a range"),
            ("n[-1]", "`-1` is not a range"),
            ("n[1--2]", "`1--2` is not a range"),
            ("n[+1-2]", "`+1-2` is not a range"),
            ("n 1", "' ' in a name"),
            ("n/../1", "'/' in a name"),
            ("n\0", "'\\0' in a name"),
            ("größe", "'ö' in a name"),
        ] {
            let error = first(list).unwrap_err();
            assert!(error.contains(why), "{list:?}: {error}");
        }
        assert!(first(&"x".repeat(254)).unwrap_err().contains("longer than 253"));
        assert!(first(&"n[1]".repeat(5000)).unwrap_err().contains("longer than 253"));
        assert!(first(&format!("n[{}1]", "0".repeat(100_000))).is_err());
    }

    #[test]
    fn any_text_is_an_error_or_a_list_whose_host_is_a_name() {
        let mut random = fastrand::Rng::with_seed(1);
        for round in 0..20_000 {
            let mut list = String::new();
            for _ in 0..random.usize(..60) {
                // Half of the lists have only characters that valid ones have.
                let of_list = char::from(*random.choice(b"abc019[],. -").unwrap());
                list.push(if round % 2 == 0 { of_list } else { random.char(..) });
            }
            if let Ok((host, _)) = first(&list) {
                assert!((1..=LONGEST_NAME).contains(&host.len()), "{list:?}");
            }
        }
    }
}
