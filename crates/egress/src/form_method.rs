//! Finds the field of a form by which some servers are told another method than the request has.
//!
//! Rails, Laravel, Symfony and others take `_method` of a posted form for the request's method. So a POST that `allow` lets
//! pass could be a DELETE for the service. A body that has such a field is broken off before the field is sent on, and a
//! request whose body does not end is not served.

use http::{HeaderMap, Method, header};

/// The fields, in lower case.
const FIELDS: [&str; 2] = ["_method", "x-http-method-override"];
/// What precedes a field's name in the head of a part, without quotes: an encoding may be named.
const PART_PREFIXES: [&str; 3] = ["name=", "name=utf-8", "name=iso-8859-1"];
/// The header of a part that names its field.
const DISPOSITION: &[u8] = b"content-disposition";
/// Characters of a name or line that are kept: more than any of the above has.
const MAX_KEPT: usize = 96;

/// Looks for such a field in a body as it passes.
pub(crate) struct MethodFieldSearch {
    form: Option<FormNames>,
    parts: Option<PartHeads>,
    /// The body cannot be looked at.
    is_encoded: bool,
}

impl MethodFieldSearch {
    /// The search for a request; none if no server would take the body for a form.
    pub(crate) fn of_request(method: &Method, headers: &HeaderMap) -> Option<Self> {
        if *method != Method::POST {
            return None;
        }
        let values = headers.get_all(header::CONTENT_TYPE).iter();
        let types: Vec<String> = values
            .map(|value| String::from_utf8_lossy(value.as_bytes()).to_ascii_lowercase())
            .collect();
        let names = |text: &str| types.iter().any(|of| of.contains(text));
        // Without a type some take it for a form.
        let is_form = types.iter().all(|of| of.trim().is_empty()) || names("x-www-form-urlencoded");
        let is_multipart = names("multipart/");
        (is_form || is_multipart).then(|| Self {
            form: is_form.then(FormNames::default),
            parts: is_multipart.then(PartHeads::default),
            is_encoded: headers.contains_key(header::CONTENT_ENCODING),
        })
    }

    /// Looks at the next piece of the body; true if it has the field, or cannot be looked at.
    pub(crate) fn finds_in(&mut self, piece: &[u8]) -> bool {
        let in_form = self.form.as_mut().is_some_and(|form| form.finds_in(piece));
        let in_parts = self.parts.as_mut().is_some_and(|parts| parts.finds_in(piece));
        in_form || in_parts || (self.is_encoded && !piece.is_empty())
    }
}

/// Decodes `%41` as it passes.
#[derive(Default)]
struct EscapeDecoder {
    /// The digits of an escape so far.
    digits: Option<Vec<u8>>,
}

impl EscapeDecoder {
    /// The next character; none within an escape. What is no escape is dropped, which only makes more be found.
    fn decode(&mut self, byte: u8) -> Option<u8> {
        if byte == b'%' {
            self.digits = Some(Vec::with_capacity(2));
            return None;
        }
        let Some(digits) = &mut self.digits else {
            return Some(byte);
        };
        if !byte.is_ascii_hexdigit() {
            self.digits = None;
            return Some(byte);
        }
        digits.push(byte);
        if digits.len() < 2 {
            return None;
        }
        let value = std::str::from_utf8(digits)
            .ok()
            .and_then(|text| u8::from_str_radix(text, 16).ok());
        self.digits = None;
        value
    }
}

/// The names of a form's fields, in the encoding of URLs.
#[derive(Default)]
struct FormNames {
    decoder: EscapeDecoder,
    name: Vec<u8>,
    in_value: bool,
}

impl FormNames {
    fn finds_in(&mut self, piece: &[u8]) -> bool {
        piece.iter().any(|byte| match byte {
            b'&' | b';' => {
                *self = Self::default();
                false
            }
            _ if self.in_value => false,
            b'=' => {
                self.in_value = true;
                FIELDS.iter().any(|field| field.as_bytes() == self.name)
            }
            byte => {
                if let Some(c) = self.decoder.decode(*byte)
                    // Servers strip brackets and white space.
                    && !b"[]+ \t\r\n\0".contains(&c)
                    && self.name.len() < MAX_KEPT
                {
                    self.name.push(c.to_ascii_lowercase());
                }
                false
            }
        })
    }
}

/// The heads of a multipart body's parts: lines that begin with `Content-Disposition`, and those that continue them. Where
/// parts begin is not looked at, because servers differ in it.
#[derive(Default)]
struct PartHeads {
    decoder: EscapeDecoder,
    line: Vec<u8>,
    /// How the line is read.
    state: LineState,
    was_disposition: bool,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum LineState {
    /// Nothing of it came yet.
    #[default]
    Start,
    /// What came may be the beginning of the header's name.
    Name,
    /// The header, after its name.
    Disposition,
    /// Anything else.
    Other,
}

impl PartHeads {
    fn finds_in(&mut self, piece: &[u8]) -> bool {
        piece.iter().any(|byte| self.finds_with(*byte))
    }

    fn finds_with(&mut self, byte: u8) -> bool {
        if byte == b'\n' || byte == b'\r' {
            let found = self.state == LineState::Disposition && self.ends_with_field();
            // Nothing came since the last one: both are the end of one line.
            if self.state != LineState::Start {
                self.was_disposition = self.state == LineState::Disposition;
            }
            self.start_line();
            return found;
        }
        match self.state {
            LineState::Start if self.was_disposition && (byte == b' ' || byte == b'\t') => {
                self.state = LineState::Disposition;
                false
            }
            LineState::Start | LineState::Name => {
                self.line.push(byte.to_ascii_lowercase());
                self.state = match DISPOSITION.starts_with(&self.line) {
                    false => LineState::Other,
                    true if self.line.len() < DISPOSITION.len() => LineState::Name,
                    true => {
                        self.line.clear();
                        LineState::Disposition
                    }
                };
                false
            }
            LineState::Other => false,
            LineState::Disposition => {
                let Some(c) = self.decoder.decode(byte) else {
                    return false;
                };
                if b"\"'\\* \t[]".contains(&c) {
                    // After a quote or a space the name is over.
                    return c != b'[' && c != b'\\' && c != b'*' && self.ends_with_field();
                }
                let is_name = c.is_ascii_alphanumeric() || b"_-".contains(&c);
                if !is_name && self.ends_with_field() {
                    return true;
                }
                if self.line.len() == MAX_KEPT {
                    self.line.remove(0);
                }
                self.line.push(c.to_ascii_lowercase());
                false
            }
        }
    }

    fn start_line(&mut self) {
        self.line.clear();
        self.decoder = EscapeDecoder::default();
        self.state = LineState::Start;
    }

    fn ends_with_field(&self) -> bool {
        let ends_with = |prefix: &&str, field: &&str| {
            let rest = self.line.strip_suffix(field.as_bytes());
            let rest = rest.and_then(|rest| rest.strip_suffix(prefix.as_bytes()));
            // Not `filename`.
            rest.is_some_and(|rest| rest.last().is_none_or(|c| !c.is_ascii_alphanumeric()))
        };
        let mut pairs = PART_PREFIXES
            .iter()
            .flat_map(|prefix| FIELDS.iter().map(move |field| (prefix, field)));
        pairs.any(|(prefix, field)| ends_with(prefix, field))
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn finds(types: &[&'static str], body: &str) -> bool {
        let mut headers = HeaderMap::new();
        for value in types {
            headers.append(header::CONTENT_TYPE, HeaderValue::from_static(value));
        }
        let whole = MethodFieldSearch::of_request(&Method::POST, &headers)
            .is_some_and(|mut search| search.finds_in(body.as_bytes()));
        let in_pieces = MethodFieldSearch::of_request(&Method::POST, &headers)
            .is_some_and(|mut search| body.as_bytes().iter().any(|byte| search.finds_in(&[*byte])));
        assert_eq!(whole, in_pieces, "{body}");
        whole
    }

    const FORM: &str = "application/x-www-form-urlencoded; charset=utf-8";
    const PARTS: &str = "Multipart/Form-Data; boundary=b";

    #[test]
    fn a_method_in_a_form_is_found_however_it_is_written() {
        for body in [
            "_method=DELETE",
            "a=b&_method=DELETE",
            "a=b;_METHOD=put",
            "a&%5Fmetho%64=DELETE",
            "[_method]=DELETE",
            "+_method%20=x",
            "X-HTTP-Method-Override=PUT",
        ] {
            assert!(finds(&[FORM], body), "{body}");
            assert!(
                finds(&[], body) && finds(&["application/json", FORM], body),
                "{body}"
            );
            assert!(!finds(&["application/json"], body), "{body}");
        }
        for body in [
            "method=x",
            "_methods=x",
            "a_method=x",
            "a=_method%3Dx",
            "a=x=_method",
            "",
        ] {
            assert!(!finds(&[FORM], body), "{body}");
        }
    }

    #[test]
    fn a_method_in_a_part_is_found_however_it_is_written() {
        for head in [
            "Content-Disposition: form-data; name=\"_method\"\r\n",
            "content-disposition:form-data;name=_method\n",
            "CONTENT-DISPOSITION: form-data; NAME = '_METHOD'; x=y\r\n",
            "Content-Disposition: form-data;\r\n\tname=\"\\_method\"\r\n",
            "Content-Disposition: form-data; name*=UTF-8''%5Fmethod\r\n",
            "Content-Disposition: form-data; name=\"[_method]\"\r\n",
        ] {
            let body = format!("--b\r\nX: y\r\n{head}\r\nDELETE\r\n--b--\r\n");
            assert!(finds(&[PARTS], &body), "{head}");
        }
        for body in [
            "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"_method\"\r\n\r\nx",
            "--b\r\nContent-Disposition: form-data; name=\"_methods\"\r\n\r\nx",
            "--b\r\nContent-Disposition: form-data; name=\"f\"\r\n\r\n<input name=\"_method\">\r\n",
        ] {
            assert!(!finds(&[PARTS], body), "{body}");
        }
    }

    #[test]
    fn only_posted_forms_are_looked_at_and_compressed_ones_are_not_trusted() {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(FORM));
        assert!(MethodFieldSearch::of_request(&Method::PUT, &headers).is_none());
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        let mut search = MethodFieldSearch::of_request(&Method::POST, &headers).unwrap();
        assert!(search.finds_in(b"x"));
    }
}
