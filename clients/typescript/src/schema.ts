/** Argument types of lent functions, inferred from their JSON Schema. */

/** The names of JSON types in a schema. */
export type SchemaType = "string" | "number" | "integer" | "boolean" | "null" | "array" | "object";

/** A JSON Schema. Only the keywords that shape a TypeScript type are listed; others are sent as they are. */
export type JsonSchema =
  | boolean
  | {
      readonly type?: SchemaType | readonly SchemaType[];
      readonly description?: string;
      readonly const?: unknown;
      readonly enum?: readonly unknown[];
      readonly properties?: { readonly [name: string]: JsonSchema };
      readonly required?: readonly string[];
      readonly additionalProperties?: JsonSchema;
      readonly items?: JsonSchema;
      readonly anyOf?: readonly JsonSchema[];
      readonly oneOf?: readonly JsonSchema[];
      readonly allOf?: readonly JsonSchema[];
      readonly [keyword: string]: unknown;
    };

/** The input schema of a tool, which is of type object. */
export type ObjectSchema = Exclude<JsonSchema, boolean> & { readonly type: "object" };

/**
 * The type of the values a schema allows. What it cannot say (`$ref`, patterns, bounds) is wider than the schema: the
 * server checks the arguments against the schema before the function is called.
 */
export type FromSchema<S> = S extends false
  ? never
  : S extends { readonly const: infer Value }
    ? Mutable<Value>
    : S extends { readonly enum: readonly (infer Value)[] }
      ? Mutable<Value>
      : S extends { readonly anyOf: readonly (infer Option)[] }
        ? FromSchema<Option>
        : S extends { readonly oneOf: readonly (infer Option)[] }
          ? FromSchema<Option>
          : S extends { readonly allOf: infer Parts }
            ? FromAll<Parts>
            : S extends { readonly type: infer Type }
              ? FromType<Type extends readonly (infer One)[] ? One : Type, S>
              : unknown;

type FromType<Type, S> = SchemaType extends Type
  ? unknown
  : Type extends "string"
    ? string
    : Type extends "number" | "integer"
      ? number
      : Type extends "boolean"
        ? boolean
        : Type extends "null"
          ? null
          : Type extends "array"
            ? FromArray<S>
            : Type extends "object"
              ? FromObject<S>
              : unknown;

type FromArray<S> = S extends { readonly items: infer Item } ? FromSchema<Item>[] : unknown[];

type FromObject<S> = S extends { readonly properties: infer Properties }
  ? Flatten<
      { -readonly [Name in keyof Properties as Name extends RequiredOf<S> ? Name : never]: FromSchema<Properties[Name]> } & {
        -readonly [Name in keyof Properties as Name extends RequiredOf<S> ? never : Name]?: FromSchema<Properties[Name]>;
      }
    >
  : S extends { readonly additionalProperties: infer Value }
    ? Record<string, FromSchema<Value>>
    : Record<string, unknown>;

type RequiredOf<S> = S extends { readonly required: readonly (infer Name)[] } ? Name : never;

type FromAll<Parts> = Parts extends readonly [infer First, ...infer Rest] ? FromSchema<First> & FromAll<Rest> : unknown;

type Flatten<T> = { [Key in keyof T]: T[Key] };

type Mutable<T> = T extends object ? { -readonly [Key in keyof T]: Mutable<T[Key]> } : T;
